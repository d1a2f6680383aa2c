"""Text to prompt tokens: conversation layout and speaker turns. Runs on the CPU.

A row of a prompt: token id, and K codes if it is a code of codebook 0."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sonoro.core.errors import CheckpointError, InvalidRequest
from sonoro.core.types import check_text
from sonoro.models.base import Spoken, Voice
from sonoro.models.shared.prompts import ControlTokens, Ids, RowPrompt
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText, joined

from .config import ModelConfig

MOST_TURNS = 5
MOST_BYTES = 200
"""Limits of a segment: turns, and UTF-8 bytes unless it is a single turn (the official server's defaults)."""

FRAMES_KEPT_FREE = 2048
"""Positions reserved for frames (official), at most half of the model's: a longer prompt drops its earliest turns."""

_SPEAKER = re.compile(r"<\|speaker:\d+\|>")
_TAG = re.compile(r"<\|[^|\s]*\|>")
PHONEME_TOKENS = ("<|phoneme_start|>", "<|phoneme_end|>")
"""Around phonemes in ARPAbet: the only special tokens allowed in a text."""


@dataclass(frozen=True)
class FishVoice:
    """`Voice.data` of this model: transcripts of the references, and their concatenated `frames` [R, K] int64."""

    transcripts: tuple[str, ...]
    frames: Tensor


class ConversationBuilder:
    """Builds the prompts of segments: a system message, earlier turns with their frames, and the turn to speak.
    Follows fishaudio/fish-speech fish_speech/models/text2semantic/inference.py `generate_long`. Raises
    `CheckpointError` if the tokeniser does not match `config`."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self._tokenizer, special = tokenizer, tokenizer.special
        for token, expected in _special_ids(config).items():
            if (found := special.get(token)) is None or expected not in (None, found):
                raise CheckpointError(f"tokenizer.json: {token} is {found}; it must be {expected or 'there'}")
        if tokenizer.size > (most := config.text_config.vocab_size):
            raise CheckpointError(f"tokenizer.json holds id {tokenizer.size - 1}; text_config.vocab_size is {most}")
        controls = {index: token for token, index in special.items() if token not in PHONEME_TOKENS}
        self.control_tokens = ControlTokens(controls)
        system, self._end = self._template("<|im_start|>system\n"), self._template("<|im_end|>\n")
        self._plain = [system, self._template("convert the provided text to speech"), self._end]
        refer = "convert the provided text to speech reference to the following:\n\nText:\n"
        self._cloned = [system, self._template(refer), self._template("\n\nSpeech:\n")]
        self._user, self._assistant = map(self._template, ("<|im_start|>user\n", "<|im_start|>assistant\n<|voice|>"))

    def build(
        self, text: str, controls: Controls, earlier: Sequence[Spoken] = (), voice: Voice | None = None
    ) -> RowPrompt:
        """Build the prompt of `text` after the turns `earlier`, spoken as `voice`.
        Raises `InvalidRequest` for text with a control token, or too long for the model."""
        named = _with_speakers([*(said for said, _ in earlier), text])
        *said, asked = map(self._asked, named)
        turns = [
            np.concatenate([question, self._codes(frames), self._end])
            for question, (_, frames) in zip(said, earlier, strict=True)
        ]
        system = np.concatenate(self._plain if voice is None else self._introduced(voice.data))
        most = self.config.text_config.max_seq_len
        room = most - max(min(FRAMES_KEPT_FREE, most // 2), controls.max_frames)
        while turns and len(system) + len(asked) + sum(map(len, turns)) > room:
            del turns[0]
        columns = np.concatenate([system, *turns, asked])
        needed = len(columns) + controls.max_frames
        if needed > most:
            raise InvalidRequest("text", text, f"its prompt and frames take {needed} positions, the model has {most}")
        before = len(self._user) + len(self._template(named[-1].removesuffix(text)))
        return RowPrompt(
            controls,
            columns,
            prefix=columns[: -len(asked)],
            text_start=len(columns) - len(asked) + before,
            text_count=len(asked) - before - len(self._end) - len(self._assistant) + 1,
        )

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Characters (start, end) of each token of a segment `text`, end token included; empty for tokens of a tag."""
        tags = [found.span() for found in _TAG.finditer(text)]
        spans = [
            (start, start) if any(first < end and start < last for first, last in tags) else (start, end)
            for start, end in self._tokenizer.spans(text)
        ]
        return [*spans, (len(text), len(text))]

    def check_transcript(self, text: str) -> None:
        """Raise `InvalidRequest` naming `ref_text` if `text`, of a recording, cannot be part of a prompt."""
        self._text("ref_text", text)

    def _introduced(self, voice: FishVoice) -> list[Ids]:
        """The system message with the references of `voice`; transcripts without a speaker tag get one."""
        named = (
            text if _SPEAKER.search(text) else f"<|speaker:{index}|>{text}"
            for index, text in enumerate(voice.transcripts)
        )
        start, asked, speech = self._cloned
        return [start, asked, self._text("ref_text", "\n".join(named)), speech, self._codes(voice.frames), self._end]

    def _asked(self, text: str) -> Ids:
        """The user's message `text`, and the start of the assistant's answer."""
        return np.concatenate([self._user, self._text("text", text), self._end, self._assistant])

    def _text(self, field: str, text: str) -> Ids:
        check_text(field, text)
        columns = self._template(text)
        self.control_tokens.check(field, text, columns[:, 0].tolist())
        return columns

    def _template(self, text: str) -> Ids:
        """The columns of `text`, tokenised by itself: no merge crosses its ends."""
        ids = self._tokenizer.encode(text)
        columns = np.zeros((len(ids), 1 + self.config.audio_decoder_config.num_codebooks), np.int64)
        columns[:, 0] = ids
        return columns

    def _codes(self, frames: Tensor) -> Ids:
        tokens = frames[:, :1] + self.config.semantic_start_token_id
        return torch.cat((tokens, frames), dim=1).cpu().numpy()


def stand_in(config: ModelConfig) -> TextTokenizer:
    """A byte-level stand-in tokeniser with the special tokens of `config`."""
    known = _special_ids(config)
    return TextTokenizer.stand_in({token: index or 256 + number for number, (token, index) in enumerate(known.items())})


def _special_ids(config: ModelConfig) -> dict[str, int | None]:
    """Special tokens of a prompt, and their ids; None where `config` does not say."""
    given = {"<|im_end|>": config.eos_token_id, "<|semantic:0|>": config.semantic_start_token_id}
    return {"<|im_start|>": None, "<|voice|>": None, **given}


def split_turns(text: str) -> list[SpokenText]:
    """Split `text` at its `<|speaker:N|>` tags into segments of some turns each; without tags it is one segment.
    Text before the first tag is a segment of its own; the official code drops it."""
    whole, starts = SpokenText(text), [found.start() for found in _SPEAKER.finditer(text)]
    if not starts:
        return [whole]
    batches: list[list[SpokenText]] = [[]]
    for start, end in itertools.pairwise([*starts, len(text)]):
        turn = whole.part(start, end).stripped()
        if len(batches[-1]) >= MOST_TURNS or sum(len(one.text.encode()) for one in (*batches[-1], turn)) > MOST_BYTES:
            batches.append([])
        batches[-1].append(turn)
    before = whole.part(0, starts[0]).stripped()
    return [piece for piece in (before, *(joined(turns, "\n") for turns in batches)) if piece.text]


def _with_speakers(texts: Sequence[str]) -> list[str]:
    """Prepend the last speaker tag to each of the consecutive `texts` that has none: it was cut from that turn."""
    speaker, named = "", []
    for text in texts:
        tags = _SPEAKER.findall(text)
        named.append(text if tags else speaker + text)
        speaker = tags[-1] if tags else speaker
    return named
