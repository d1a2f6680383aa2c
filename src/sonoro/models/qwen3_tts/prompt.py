"""Text to prompt tokens: tokeniser, templates and row layouts of the checkpoint. Runs on the CPU; touches no weight.

A prompt token is the sum of a text-side row and a codec-side row of the talker's width; both are kept as ids here and
gathered on the device at prefill.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from sonoro.core.errors import CheckpointError, CheckpointNotFound, InvalidRequest
from sonoro.core.normalize import NormalizedText, normalize_english
from sonoro.core.types import check_text
from sonoro.models.base import Controls, Voice
from sonoro.nn.configs import read_json
from sonoro.nn.tokenizer import library_border

from .config import ModelConfig

__all__ = ["SPLITS", "ClonedVoice", "PromptBuilder", "TalkerPrompt", "TextTokenizer"]

logger = logging.getLogger(__name__)

NOTHING = -1

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "mistral": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""What a merge may not cross: as these tokenizers were made, and as transformers 4.57.3, which the official package
asks for, splits them instead where it takes a local folder for one of Mistral's (it passes `fix_mistral_regex`)."""

_MISTRAL_FROM = 100_000
"""Tokens that a vocabulary holds more of, for that to happen."""


@dataclass(frozen=True)
class ClonedVoice:
    """`Voice.data` of this model: `x_vector` [H] float32, and the transcript when the audio is continued in context."""

    x_vector: Tensor
    transcript: str | None = None


@dataclass(frozen=True)
class TalkerPrompt:
    """One segment as ids, P rows. -1 means: nothing on this side.

    `text_rows` [P] int64 index the projected text table. `code_rows` [P, K] int64: column 0 indexes the talker's codec
    embedding (codes, control ids, speakers), column g >= 1 the predictor's table g; a row's embeddings are summed.
    `x_vector_row` is the row that carries the voice's x-vector [H], if any. `trail` [n] int64 are the text ids fed one
    a frame from the second frame on; then the pad id is fed. The text is at positions from `text_start` on,
    `text_count` of them, or as many as come where it is fed a token a frame.
    """

    controls: Controls
    voice: Voice | None
    text_rows: Tensor
    code_rows: Tensor
    trail: Tensor
    x_vector_row: int | None = None
    text_start: int = 0
    text_count: int = 0
    prefix: None = None
    """A page at most: where a reference is continued, its codes stand beside or behind the new text."""

    @property
    def positions(self) -> int:
        return self.text_rows.shape[0]

    @property
    def text_ids(self) -> int:
        return self.trail.shape[0]


class TextTokenizer:
    """Byte-level BPE over ordinary text. Special tokens written in a text are text to it, never their ids."""

    def __init__(self, vocabulary: models.BPE, split: str = "qwen2", config: Path | None = None) -> None:
        self._vocabulary, self._config = vocabulary, config
        self.reads_control_tokens = False
        self.split_by(split)

    def split_by(self, split: str) -> None:
        """Split texts as `SPLITS` has it under that name."""
        self.split, self._tokenizer, self._reading = split, self._made(split), self._made(split)
        if self.reads_control_tokens:
            self.read_control_tokens()

    def read_control_tokens(self, *, is_on: bool = True) -> None:
        """Have `read` take control tokens for themselves: those that tokenizer_config.json adds to the vocabulary.

        Raises `CheckpointError` if there are none, or if they do not follow the vocabulary.
        """
        self.reads_control_tokens, self._reading = is_on, self._made(self.split)
        for token, index in _control_tokens(self._config) if is_on else ():
            # The library gives each the next number.
            self._reading.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            if self._reading.token_to_id(token) != index:
                raise CheckpointError(f"{self._config}: {token} is {index}; the vocabulary leaves other numbers")

    def _made(self, split: str) -> Tokenizer:
        tokenizer = Tokenizer(self._vocabulary)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> TextTokenizer:
        """The tokeniser of a checkpoint folder. Raises `CheckpointNotFound` or `CheckpointError` naming the file."""
        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        for file in (vocabulary, merges):
            if not file.is_file():
                raise CheckpointNotFound(f"{file} does not exist; a checkpoint folder holds vocab.json and merges.txt")
        with library_border(f"{vocabulary} and {merges} are no byte-level BPE"):
            made = models.BPE.from_file(str(vocabulary), str(merges))
        tokenizer = cls(made, config=folder / "tokenizer_config.json")
        if _is_taken_for_mistral(folder, tokenizer.size):
            tokenizer.split_by("mistral")
        # A symbol outside the vocabulary would be dropped from the text without a word.
        if unknown := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - tokenizer._tokenizer.get_vocab().keys()):
            raise CheckpointError(f"{vocabulary} lacks {len(unknown)} of the 256 byte symbols, such as {unknown[0]!r}")
        return tokenizer

    @classmethod
    def stand_in(cls) -> TextTokenizer:
        """One token a byte: for random weights, where no text means anything."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        return cls(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def read(self, text: str) -> list[int]:
        """The ids of `text`, in which control tokens that it spells stand for themselves if they are to be read."""
        return self._reading.encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Which characters of `text` each of the tokens that `read` gives stands for."""
        return list(self._reading.encode(text, add_special_tokens=False).offsets)

    def encode_settled(self, text: str) -> tuple[list[int], str]:
        """The ids of `text` as far as whatever may follow it cannot change them, and the text that is left.

        `text` begins where a token does, and NFC composes none of its characters with later ones.
        """
        text = self._tokenizer.normalizer.normalize_str(text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        words = {word: span[1] for word, span in zip(encoding.word_ids, encoding.offsets, strict=True)}
        # A word (what a merge may not cross) is known to be whole if a character is known that it stops before. White
        # space at the end of all text is cut off, so until it is not at the end it belongs to no word.
        spoken = len(text.rstrip())
        known = [end for end in words.values() if end < spoken or end == spoken < len(text)]
        if self.split == "mistral":
            # Where letters change their case, one that comes later may draw the word on.
            known = [end for end in known if not _is_letter(text[end])]
        left = max(known, default=0)
        return [one for one, word in zip(encoding.ids, encoding.word_ids, strict=True) if words[word] <= left], text[
            left:
        ]


def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LM"


def _control_tokens(file: Path | None) -> list[tuple[str, int]]:
    """The tokens that the tokenizer_config.json `file` adds to the vocabulary, by number."""
    try:
        added = read_json(file).get("added_tokens_decoder") if file is not None and file.is_file() else None
        found = [(str(token["content"]), int(index)) for index, token in (added or {}).items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: added_tokens_decoder is not tokens by number: {error!r}") from error
    if not found:
        raise CheckpointError(f"{file or 'a stand-in'}: control tokens cannot be read, as it names none")
    return sorted(found, key=lambda token: token[1])


def _is_taken_for_mistral(folder: Path, size: int) -> bool:
    """Whether transformers 4.57.3 would take the tokenizer of the local `folder` for one of Mistral's."""
    file = folder / "config.json"
    if size <= _MISTRAL_FROM or not file.is_file():
        return False
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(read_json(file).get("transformers_version") or ""))
    return found is None or (4, 57, 2) < tuple(int(part or 0) for part in found.groups()) < (5, 0, 0)


class PromptBuilder:
    """Lays out segments as `config`'s checkpoint was trained to read them.

    Follows QwenLM/Qwen3-TTS qwen_tts/core/models/modeling_qwen3_tts.py `generate` and
    qwen_tts/inference/qwen3_tts_model.py.
    """

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        if config.text_normalizer not in (None, "english"):
            raise CheckpointError(
                f"config.json: text_normalizer is {config.text_normalizer!r}; only 'english' is known"
            )
        if tokenizer.size > config.talker_config.text_vocab_size:
            raise CheckpointError(
                f"vocab.json holds id {tokenizer.size - 1}; text_vocab_size is {config.talker_config.text_vocab_size}"
            )
        self._line_break = tokenizer.encode("\n")
        self._role = [config.im_start_token_id, config.assistant_token_id, *self._line_break]

    def spell_out(self, text: str) -> NormalizedText:
        """`text` as the checkpoint wants it read, and which of its characters it cannot speak."""
        if self.config.text_normalizer is None:
            return NormalizedText(text, "")
        return normalize_english(text, lowercase=True, respellings=self.config.respellings)

    def normalize(self, text: str) -> str:
        """`text` as the checkpoint wants it read. What cannot be spoken, all of it maybe, goes: whoever speaks for a
        person asks `core.readable` for remarks first."""
        normalized = self.spell_out(text)
        if normalized.dropped:
            logger.info("event=characters_dropped count=%d", len(normalized.dropped))
            # By default no log holds what somebody wrote: of a text in another script these are most of it.
            logger.debug("event=characters_dropped characters=%r", normalized.dropped)
        return normalized.text

    def build(self, text: str, controls: Controls, **layout: Any) -> TalkerPrompt:
        """The prompt of `text`, laid out as `build_from_ids` is told.

        Raises `InvalidRequest` for text without a token, or too long for the talker.
        """
        line_break, *ids = self._encode("text", text)
        if not text.strip():
            raise InvalidRequest("text", text, "it must give at least one token")
        return self.build_from_ids([*ids, self.config.tts_eos_token_id], controls, line_break=line_break, **layout)

    def build_from_ids(
        self,
        ids: Sequence[int],
        controls: Controls,
        *,
        is_non_streaming: bool,
        language: str = "auto",
        speaker: str | None = None,
        instructions: str | None = None,
        voice: Voice | None = None,
        line_break: int | None = None,
    ) -> TalkerPrompt:
        """The prompt of a text that is `ids` and an end of text: all of it at once, or (streaming) one token now and
        one a frame in the trail; not in context, `ids` may be the beginning alone.

        `language` and `speaker` are lower-cased names the checkpoint knows. A `voice` with reference frames is
        continued in context. `line_break` is the token before the text: another than usual where the text begins with
        line breaks. Raises `InvalidRequest` for text too long for the talker.
        """
        talker = self.config.talker_config
        rows = _Rows()
        pad = self.config.tts_pad_token_id
        if instructions:
            rows.add(self._instruction(instructions))
        rows.add(self._role if line_break is None else [*self._role[:-1], line_break])
        tags = self._tags(language, speaker)
        rows.add([pad] * len(tags), [[tag] for tag in tags])
        x_vector_row = None
        if voice is not None:
            x_vector_row = len(rows)
            rows.add([pad])
        elif speaker is not None:
            rows.add([pad], [[talker.spk_id[speaker]]])
        rows.add([self.config.tts_bos_token_id], [[talker.codec_pad_id]])
        if voice is not None and voice.reference_frames is not None:
            assert voice.data.transcript is not None
            transcript = self._encode("ref_text", voice.data.transcript)[1:]
            start, whole = len(rows) + len(transcript), [*transcript, *ids]
            trail = self._add_in_context(rows, whole, voice.reference_frames, is_non_streaming=is_non_streaming)
        else:
            start = len(rows)
            trail = self._add_text(rows, ids, is_non_streaming=is_non_streaming)
        needed = len(rows) + controls.max_frames
        if needed > talker.max_position_embeddings:
            limit = f"its prompt and frames take {needed} positions, the model has {talker.max_position_embeddings}"
            raise InvalidRequest("text", f"{len(ids)} tokens", limit)
        return TalkerPrompt(
            controls=controls,
            voice=voice,
            text_rows=torch.tensor(rows.text),
            code_rows=rows.code_rows(talker.num_code_groups),
            trail=torch.tensor(trail, dtype=torch.int64),
            x_vector_row=x_vector_row,
            text_start=start,
            text_count=len(ids) if is_non_streaming else talker.max_position_embeddings,
        )

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Which characters of a segment `text` each of its tokens reads, the end of text included."""
        # As `build` reads it: behind the template's line break, the first token.
        spans = [(start - 1, end - 1) for start, end in self.tokenizer.spans(f"\n{text}")[1:]]
        return [*((max(start, 0), end) for start, end in spans), (len(text), len(text))]

    def _encode(self, field: str, text: str) -> list[int]:
        """The ids of the template's line break and `text`, which are one word where `text` begins with a line break."""
        check_text(field, text)
        return self.tokenizer.read(f"\n{text}")

    def _instruction(self, instructions: str) -> list[int]:
        user = self.tokenizer.encode("user")
        payload = self._encode("instructions", instructions)
        start, end = self.config.im_start_token_id, self.config.im_end_token_id
        return [start, *user, *payload, end, *self._line_break]

    def _tags(self, language: str, speaker: str | None) -> list[int]:
        talker = self.config.talker_config
        chosen = None if language == "auto" else talker.codec_language_id[language]
        if language in ("auto", "chinese") and speaker is not None:
            dialect = talker.spk_is_dialect.get(speaker)
            chosen = talker.codec_language_id[dialect] if isinstance(dialect, str) else chosen
        if chosen is None:
            return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        return [talker.codec_think_id, talker.codec_think_bos_id, chosen, talker.codec_think_eos_id]

    def _add_text(self, rows: _Rows, text: Sequence[int], *, is_non_streaming: bool) -> Sequence[int]:
        """Add the text without a reference; returns the trail."""
        pad, talker = self.config.tts_pad_token_id, self.config.talker_config
        if not is_non_streaming:
            rows.add(text[:1], [[talker.codec_bos_id]])
            return text[1:]
        rows.add(text, [[talker.codec_pad_id]] * len(text))
        rows.add([pad], [[talker.codec_bos_id]])
        return [pad]

    def _add_in_context(
        self, rows: _Rows, text: list[int], reference_frames: Tensor, *, is_non_streaming: bool
    ) -> Sequence[int]:
        """Add the reference's transcript, the text and the reference's frames; returns the trail."""
        pad, talker = self.config.tts_pad_token_id, self.config.talker_config
        codes: list[list[int]] = [[talker.codec_bos_id], *reference_frames.tolist()]
        if is_non_streaming:
            rows.add(text, [[talker.codec_pad_id]] * len(text))
            rows.add([pad] * len(codes), codes)
            return [pad]
        beside = text[: len(codes)]
        rows.add(beside + [pad] * (len(codes) - len(beside)), codes)
        return text[len(codes) :] or [pad]


class _Rows:
    """Prompt tokens being laid out: a text id each, and the first of its K code ids as far as there are any."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._codes: list[Sequence[int]] = []

    def __len__(self) -> int:
        return len(self.text)

    def add(self, text: Sequence[int], codes: Sequence[Sequence[int]] | None = None) -> None:
        """Append one row for each of `text`, with as many of its first code ids as `codes` gives."""
        beside = [()] * len(text) if codes is None else codes
        assert len(beside) == len(text)
        self.text += text
        self._codes += beside

    def code_rows(self, codebooks: int) -> Tensor:
        """The code ids [P, K] int64."""
        padded = np.full((len(self), codebooks), NOTHING, np.int64)
        for row, codes in zip(padded, self._codes, strict=True):
            row[: len(codes)] = codes
        return torch.from_numpy(padded)
