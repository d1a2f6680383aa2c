"""Text to prompt tokens: tokeniser, templates and prompt layouts of the checkpoint. Runs on the CPU.

A prompt token sums a text embedding and codec embeddings; prompts hold their ids, which the device embeds."""

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
from sonoro.core.types import TextFormat, check_text
from sonoro.models.base import Voice
from sonoro.nn.configs import read_json
from sonoro.nn.tokenizer import library_border
from sonoro.runtime.sampling import Controls
from sonoro.text.english.reader import Reading, read

from .config import ModelConfig

logger = logging.getLogger(__name__)

NOTHING = -1

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "mistral": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Pre-tokeniser patterns, which no merge crosses: `qwen2` is the tokeniser's own; `mistral` is what transformers
4.57.3, required by the official package, uses for a local folder that it takes for Mistral's (`fix_mistral_regex`)."""

_MISTRAL_FROM = 100_000
"""Vocabularies larger than this are taken for Mistral's."""


@dataclass(frozen=True)
class ClonedVoice:
    """`Voice.data` of this model: `x_vector` [H] float32, and the transcript if the reference is used in context."""

    x_vector: Tensor
    transcript: str | None = None


@dataclass(frozen=True)
class TalkerPrompt:
    """One segment as the ids of P prompt tokens; -1 means none.

    `text_rows` [P] int64 index the projected text table. `code_rows` [P, K] int64: column 0 indexes the talker's codec
    embedding (codes, control ids, speakers), column g >= 1 the predictor's table g; their embeddings are summed.
    `x_vector_row` is the token to which the voice's x-vector [H] is added, if any. `trail` [n] int64: text ids fed one
    per frame from the second frame on, followed by the pad id. The text occupies `text_count` positions from
    `text_start` on; if it is fed per frame, `text_count` is an upper bound."""

    controls: Controls
    voice: Voice | None
    text_rows: Tensor
    code_rows: Tensor
    trail: Tensor
    x_vector_row: int | None = None
    text_start: int = 0
    text_count: int = 0
    prefix: None = None
    """None: without the new text, a prompt has at most a page to share."""

    @property
    def positions(self) -> int:
        return self.text_rows.shape[0]

    @property
    def text_ids(self) -> int:
        return self.trail.shape[0]


class TextTokenizer:
    """Byte-level BPE. `encode` reads special tokens in a text as plain text; `read` may be set to honour them."""

    def __init__(self, vocabulary: models.BPE, split: str = "qwen2", config: Path | None = None) -> None:
        self._vocabulary, self._config = vocabulary, config
        self.reads_control_tokens = False
        self.split_by(split)

    def split_by(self, split: str) -> None:
        """Use the pre-tokeniser pattern `split` of `SPLITS`."""
        self.split, self._tokenizer, self._reading = split, self._made(split), self._made(split)
        if self.reads_control_tokens:
            self.read_control_tokens()

    def read_control_tokens(self, *, is_on: bool = True) -> None:
        """Make `read` honour control tokens written in a text: those that tokenizer_config.json adds to the vocabulary.
        Raises `CheckpointError` if there are none, or if their ids do not follow the vocabulary."""
        self.reads_control_tokens, self._reading = is_on, self._made(self.split)
        for token, index in _control_tokens(self._config) if is_on else ():
            # The library assigns consecutive ids.
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
        # The library silently drops symbols that are not in the vocabulary.
        if unknown := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - tokenizer._tokenizer.get_vocab().keys()):
            raise CheckpointError(f"{vocabulary} lacks {len(unknown)} of the 256 byte symbols, such as {unknown[0]!r}")
        return tokenizer

    @classmethod
    def stand_in(cls) -> TextTokenizer:
        """A tokeniser of one token a byte, for random weights."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        return cls(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def read(self, text: str) -> list[int]:
        """The ids of `text`, with control tokens honoured if `reads_control_tokens`."""
        return self._reading.encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The range (start, end) of characters of `text` that each token of `read` covers."""
        return list(self._reading.encode(text, add_special_tokens=False).offsets)

    def encode_settled(self, text: str) -> tuple[list[int], str]:
        """Encode the part of `text` whose ids no later text can change; returns its ids and the remaining text.
        `text` must begin at a token boundary, and NFC must not compose its characters with later ones."""
        text = self._tokenizer.normalizer.normalize_str(text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        words = {word: span[1] for word, span in zip(encoding.word_ids, encoding.offsets, strict=True)}
        # A word (a match of the pre-tokeniser pattern) is complete once a character after it is known. White space at
        # the end may still be stripped, so it belongs to no word yet.
        spoken = len(text.rstrip())
        known = [end for end in words.values() if end < spoken or end == spoken < len(text)]
        if self.split == "mistral":
            # This pattern breaks words where case changes, which a later letter may move.
            known = [end for end in known if unicodedata.category(text[end])[0] not in "LM"]
        left = max(known, default=0)
        ids = [one for one, word in zip(encoding.ids, encoding.word_ids, strict=True) if words[word] <= left]
        return ids, text[left:]


def _control_tokens(file: Path | None) -> list[tuple[str, int]]:
    """The tokens that the tokenizer_config.json `file` adds to the vocabulary, sorted by id."""
    try:
        added = read_json(file).get("added_tokens_decoder") if file is not None and file.is_file() else None
        found = [(str(token["content"]), int(index)) for index, token in (added or {}).items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: added_tokens_decoder is not tokens by number: {error!r}") from error
    if not found:
        raise CheckpointError(f"{file or 'a stand-in'}: control tokens cannot be read, as it names none")
    return sorted(found, key=lambda token: token[1])


def _is_taken_for_mistral(folder: Path, size: int) -> bool:
    """Whether transformers 4.57.3 would take the tokeniser in `folder`, of `size` ids, for Mistral's."""
    file = folder / "config.json"
    if size <= _MISTRAL_FROM or not file.is_file():
        return False
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(read_json(file).get("transformers_version") or ""))
    return found is None or (4, 57, 2) < tuple(int(part or 0) for part in found.groups()) < (5, 0, 0)


class PromptBuilder:
    """Builds the prompts of segments. Raises `CheckpointError` for a tokeniser or normaliser that does not fit
    `config`.

    Follows QwenLM/Qwen3-TTS qwen_tts/core/models/modeling_qwen3_tts.py `generate` and
    qwen_tts/inference/qwen3_tts_model.py."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        if (normalizer := config.text_normalizer) not in (None, "english"):
            raise CheckpointError(f"config.json: text_normalizer is {normalizer!r}; only 'english' is known")
        if tokenizer.size > (most := config.talker_config.text_vocab_size):
            raise CheckpointError(f"vocab.json holds id {tokenizer.size - 1}; text_vocab_size is {most}")
        self._line_break = tokenizer.encode("\n")
        self._role = [config.im_start_token_id, config.assistant_token_id, *self._line_break]

    def spell_out(
        self,
        text: str,
        text_format: TextFormat = "auto",
        context: tuple[str, str] = ("", ""),
        voice: str | None = None,
    ) -> Reading:
        """`text`, within its `context`, normalised as the checkpoint needs and as `voice` reads it, and the characters
        that it cannot speak."""
        if self.config.text_normalizer is None:
            return Reading(text)
        described = self.config.spk_description.get(voice or "")
        return read(
            text,
            text_format,
            lowercase=True,
            respellings=self.config.respellings,
            heteronyms=self.config.heteronyms,
            context=context,
            locale="" if described is None else described.locale,
        )

    def normalize(
        self,
        text: str,
        text_format: TextFormat = "auto",
        context: tuple[str, str] = ("", ""),
        voice: str | None = None,
    ) -> Reading:
        """`text` normalised as the checkpoint needs, without characters it cannot speak (perhaps all of them): to warn
        a user, ask `text.english.readable` first."""
        normalized = self.spell_out(text, text_format, context, voice)
        if normalized.dropped:
            logger.info("event=characters_dropped count=%d", len(normalized.dropped))
            # User text goes to the debug log alone: of text in another script this is most of it.
            logger.debug("event=characters_dropped characters=%r", normalized.dropped)
        return normalized

    def build(self, text: str, controls: Controls, **layout: Any) -> TalkerPrompt:
        """Build the prompt of `text`; `layout` are the keyword arguments of `build_from_ids`.
        Raises `InvalidRequest` for text without a token, or too long for the talker."""
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
        """Build the prompt of the text `ids`, which end with the end of text: all of it in the prompt
        (`is_non_streaming`), or its first token, with one more per frame in `trail`. When streaming without a reference
        in context, `ids` may be a prefix of the text.

        `language` and `speaker` are known names in lower case. A `voice` with reference frames is continued in context.
        `line_break` is the id before the text, which differs from the usual one if the text begins with line breaks.
        Raises `InvalidRequest` for text too long for the talker."""
        talker = self.config.talker_config
        rows = _Rows()
        if instructions:
            rows.add(self._instruction(instructions))
        rows.add(self._role if line_break is None else [*self._role[:-1], line_break])
        x_vector_row = self._add_voice(rows, language, speaker, voice)
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

    def _add_voice(self, rows: _Rows, language: str, speaker: str | None, voice: Voice | None) -> int | None:
        """Add language and voice to `rows`, and the start of the text; returns the row of the x-vector, if any."""
        pad, talker = self.config.tts_pad_token_id, self.config.talker_config
        tags = self._tags(language, speaker)
        rows.add([pad] * len(tags), [[tag] for tag in tags])
        x_vector_row = None if voice is None else len(rows)
        if voice is not None:
            rows.add([pad])
        elif speaker is not None:
            rows.add([pad], [[talker.spk_id[speaker]]])
        rows.add([self.config.tts_bos_token_id], [[talker.codec_pad_id]])
        return x_vector_row

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """The range (start, end) of characters that each token of a segment `text` covers, end of text included."""
        # Tokenised as by `build`: after the template's line break, which is the first token.
        spans = [(start - 1, end - 1) for start, end in self.tokenizer.spans(f"\n{text}")[1:]]
        return [*((max(start, 0), end) for start, end in spans), (len(text), len(text))]

    def _encode(self, field: str, text: str) -> list[int]:
        """The ids of the template's line break and `text`, tokenised together: a line break may merge with another.
        Raises `InvalidRequest` naming `field`."""
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
        """Add the text, without a reference in context; returns the trail."""
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
    """Prompt tokens under construction: one text id each, and the leading ones of K code ids."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._codes: list[Sequence[int]] = []

    def __len__(self) -> int:
        return len(self.text)

    def add(self, text: Sequence[int], codes: Sequence[Sequence[int]] | None = None) -> None:
        """Append a token for each id of `text`, with its leading code ids in `codes`."""
        beside = [()] * len(text) if codes is None else codes
        assert len(beside) == len(text)
        self.text += text
        self._codes += beside

    def code_rows(self, codebooks: int) -> Tensor:
        """The code ids [P, K] int64, -1 where there are none."""
        padded = np.full((len(self), codebooks), NOTHING, np.int64)
        for row, codes in zip(padded, self._codes, strict=True):
            row[: len(codes)] = codes
        return torch.from_numpy(padded)
