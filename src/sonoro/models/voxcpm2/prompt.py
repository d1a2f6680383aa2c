"""Text and recordings to prompt tokens, with the official limits. Runs on the CPU.

A row of a prompt: text id, 1 if it is a patch instead, and the patch as pairs of float32."""

import dataclasses
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
from sonoro.runtime.sampling import Controls, pack_floats
from sonoro.text.splitting import join_text

from .config import ModelConfig

_AUDIO_START, _REFERENCE_START, _REFERENCE_END = 101, 103, 104
_FIRST_PLAIN_ID = 107

_PATCHES_PER_ID, _MORE_PATCHES = 6, 10
"""The official limit on frames: 6 per text id, plus 10. From 6 per id on, the official code retries as a bad case."""

MOST_SPOKEN = 188
"""Limit of audio patches in a prompt, 30 s (the longest training clips): beyond it earlier segments are dropped."""

_PRIMING = 4
"""Number of last recordings and segments that prime the codec: its left context is shorter."""

_PARENTHESES = str.maketrans("", "", "()（）")


@dataclass(frozen=True)
class VoxVoice:
    """`Voice.data` of this model: `prompt`, a recording to continue, with its `transcript`, and `reference`, a
    recording to imitate. Both are patches [N, P, D] float32 on the CPU; N is 0 without such a recording."""

    transcript: str
    prompt: Tensor
    reference: Tensor


class PromptBuilder:
    """Builds the prompts of segments.
    Follows OpenBMB/VoxCPM voxcpm/model/voxcpm2.py `_generate_with_prompt_cache` and `merge_prompt_cache`. Raises
    `CheckpointError` if the tokeniser has more ids than `config`."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        if tokenizer.size > (most := config.lm_config.vocab_size):
            raise CheckpointError(f"tokenizer.json holds id {tokenizer.size - 1}; lm_config.vocab_size is {most}")
        self.control_tokens = ControlTokens({index: token for token, index in tokenizer.special.items()})
        self._characters = tokenizer.chinese_characters()
        self._width = 2 + config.patch_size * config.feat_dim // 2

    def build(
        self,
        text: str,
        controls: Controls,
        earlier: Sequence[Spoken] = (),
        voice: Voice | None = None,
        instructions: str | None = None,
    ) -> RowPrompt:
        """Build the prompt of `text` after the segments `earlier`, spoken as `voice`.
        `instructions` precede the first segment. Unless `ignore_eos`, the number of text ids limits the frames below
        `controls.max_frames`. Raises `InvalidRequest` for control tokens, for instructions that are empty or with a
        voice that continues a recording, and for a prompt too long for the model."""
        data = VoxVoice("", *[torch.empty(0)] * 2) if voice is None else voice.data
        control = "" if instructions is None else _control(instructions)
        if control and len(data.prompt):
            limit = "a voice that continues its recording takes none: give the recording as a reference alone"
            raise InvalidRequest("instructions", instructions, limit)
        kept = list(earlier)
        while len(kept) > (voice is None) and len(data.prompt) + sum(len(made) for _, made in kept) > MOST_SPOKEN:
            del kept[0]
        texts = [*(one.text for one in kept), text]
        texts[0] = control + texts[0]
        for field, part in (("ref_text", data.transcript), ("instructions", control)):
            self._ids(field, part)
        # Tokenised as one string: a token may span the end of the transcript.
        whole = self._ids("text", data.transcript + join_text(texts))
        rows, prefix = [self._rows([*whole, _AUDIO_START])], None
        if len(data.reference):
            start, end = (self._rows([mark]) for mark in (_REFERENCE_START, _REFERENCE_END))
            prefix = np.concatenate((start, self._heard(data.reference), end))
            rows.insert(0, prefix)
        rows += [self._heard(made) for made in (data.prompt, *(one.frames for one in kept)) if len(made)]
        controls = controls if controls.ignore_eos else self._limited(controls, texts[-1])
        last = [made for made in (data.prompt, *(one.frames for one in earlier)) if len(made)][-_PRIMING:]
        own = len(self._ids("text", text))
        prompt = RowPrompt(
            controls,
            np.concatenate(rows),
            voice=Voice(None, torch.cat(last)) if earlier else None,
            prefix=prefix,
            # After all other text, before the audio.
            text_start=(0 if prefix is None else len(prefix)) + len(whole) - own,
            text_count=own + 1,
        )
        needed, most = prompt.positions + controls.max_frames, self._config.max_length
        if needed > most:
            raise InvalidRequest("text", text, f"its prompt and frames take {needed} positions, the model has {most}")
        return prompt

    def _limited(self, controls: Controls, text: str) -> Controls:
        """`controls` with the limits of frames that the number of ids of `text` sets."""
        doubtful = _PATCHES_PER_ID * len(self._ids("text", text))
        bound = min(doubtful + _MORE_PATCHES, controls.max_frames)
        return dataclasses.replace(controls, max_frames=bound, doubtful_frames=doubtful)

    def check_transcript(self, text: str) -> None:
        """Raise `InvalidRequest` naming `ref_text` if `text`, of a recording, cannot be part of a prompt."""
        self._ids("ref_text", text)

    def _ids(self, field: str, text: str) -> list[int]:
        """The ids of `text`, with tokens of several Chinese characters split: the model mispronounces them otherwise.
        Raises `InvalidRequest` naming `field` for a control token."""
        check_text(field, text)
        ids = [part for index in self._tokenizer.encode(text) for part in self._characters.get(index, (index,))]
        self.control_tokens.check(field, text, ids)
        return ids

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """The range (start, end) of characters that each token of a segment `text` covers, audio start included."""
        spans: list[tuple[int, int]] = []
        for index, (start, end) in zip(self._tokenizer.encode(text), self._tokenizer.spans(text), strict=True):
            single = len(self._characters.get(index, ()))
            # One id per Chinese character; a space before them has none.
            spans += [(at, at + 1) for at in range(end - single, end)] or [(start, end)]
        return [*spans, (len(text), len(text))]

    def _rows(self, ids: Sequence[int]) -> Ids:
        rows = np.zeros((len(ids), self._width), np.int64)
        rows[:, 0] = ids
        return rows

    def _heard(self, patches: Tensor) -> Ids:
        rows = self._rows([0] * len(patches))
        rows[:, 1] = 1
        rows[:, 2:] = pack_floats(patches.float().flatten(1))
        return rows


def stand_in(config: ModelConfig) -> TextTokenizer:
    """A byte-level stand-in tokeniser that fits `config`."""
    return TextTokenizer.stand_in({}, first=min(_FIRST_PLAIN_ID, config.lm_config.vocab_size - 256))


def _control(instructions: str) -> str:
    """`instructions` in the form that precedes a text: in parentheses, without inner ones, white space collapsed.
    Raises `InvalidRequest` if they are empty."""
    words = instructions.translate(_PARENTHESES).split()
    if not words:
        raise InvalidRequest("instructions", instructions, "it must hold more than parentheses")
    return f"({' '.join(words)})"
