"""Text to prompt tokens by the official rules: how a text is prepared, and cut into chunks. Runs on the CPU.

A chunk is a segment: it is spoken from the voice alone, without text or audio of those before it. A row of a prompt is
a text id; `frame_id` stands for the first frame's input. Rows of stored positions, which a voice has as keys and
values, are never run: they name the voice, for the prefix cache."""

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from sonoro.core.errors import CheckpointError, InvalidRequest
from sonoro.core.types import check_text
from sonoro.models.shared.prompts import ControlTokens, RowPrompt
from sonoro.nn.tokenizer import TextTokenizer
from sonoro.runtime.sampling import Controls
from sonoro.text.splitting import SpokenText, joined, replaced

from .config import ModelConfig, YamlConfig
from .voice import PocketVoice

MOST_TOKENS = 50
"""Tokens of a chunk, from which sentences are joined and cut; a clause may have more."""

CONTROLS = 4
"""The first ids are control tokens; those of bytes follow."""

_FEW_WORDS, _PADDED_WORDS, _SPACES = 4, 5, 8
_AFTER_END_SHORT, _AFTER_END = 5, 3
"""Frames after the end of speech was decided, the deciding one included: for at most `_FEW_WORDS` words, and else."""

_TERMINAL, _WEAK, _CLOSERS = ".!?…", ",;:-–—", "\"'”’)]»"
_MARK_AFTER_END = re.compile(r"(?<=[.!?…])\s*[,;:]")
_SPACE = re.compile(r"\s+")


class TextRules:
    """How the texts of a checkpoint are prepared and cut into chunks.
    Raises `CheckpointError` if the tokeniser has more ids than `config`."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self._config, self.tokenizer = config, tokenizer
        if tokenizer.size > (most := config.flow_lm.lookup_table.n_bins):
            raise CheckpointError(f"the tokeniser holds id {tokenizer.size - 1}; lookup_table.n_bins is {most}")
        self._ends, self._clause_ends = (set(tokenizer.encode(marks)[1:]) for marks in (".!...?", ",;:"))

    def prepare(self, text: SpokenText) -> SpokenText:
        """`text` as the model is given it; empty if nothing of it is left."""
        config, text = self._config, self._cleaned(text)
        if not text.text:
            return text
        if config.capitalize_first_letter and not text.text[0].isupper():
            text = replaced(text, re.compile(r"\A."), lambda found: found[0].upper())
        if config.append_terminal_punctuation:
            text = _ended(text)
        if config.pad_with_spaces_for_short_inputs and len(text.text.split()) < _PADDED_WORDS:
            text = joined([SpokenText(""), text], " " * _SPACES)
        return text

    def _cleaned(self, text: SpokenText) -> SpokenText:
        config, text = self._config, text.stripped()
        if config.replace_characters:
            classes = "[" + re.escape("".join(config.replace_characters)) + "]"
            text = replaced(text, re.compile(classes), lambda found: config.replace_characters[found[0]])
            text = replaced(text, _SPACE, lambda found: " ").stripped()
            text = replaced(text, _MARK_AFTER_END, lambda found: "")
        if not text.text:
            return text
        text = replaced(replaced(text, re.compile(r"[\n\r]"), lambda found: " "), re.compile("  "), lambda found: " ")
        if config.remove_semicolons:
            text = replaced(text, re.compile(";"), lambda found: ",")
        return text

    def frames_after_end(self, text: str) -> int:
        """Frames after the one at which `text` was decided to have ended, that one included."""
        known = self._config.model_recommended_frames_after_eos
        short = len(self._cleaned(SpokenText(text)).text.split()) <= _FEW_WORDS
        return known if known is not None else _AFTER_END_SHORT if short else _AFTER_END

    def chunks(self, text: SpokenText) -> list[SpokenText]:
        """`text`, prepared as a whole, in chunks of whole sentences of at most `MOST_TOKENS` tokens where they fit, of
        clauses of a longer sentence. A chunk is prepared again when it is spoken."""
        pieces: list[tuple[int, SpokenText]] = []
        for count, sentence in self._cut(self.prepare(text).stripped(), self._ends, skips_decimals=True):
            cut = self._cut(sentence.stripped(), self._clause_ends) if count > MOST_TOKENS else []
            pieces += cut if len(cut) > 1 else [(count, sentence)]
        chunks: list[list[SpokenText]] = []
        total = 0
        for count, piece in pieces:
            if chunks and total + count <= MOST_TOKENS:
                chunks[-1].append(piece)
                total += count
            else:
                chunks.append([piece])
                total = count
        return [chunk for parts in chunks if (chunk := joined(parts, " ").stripped()).text]

    def _cut(self, text: SpokenText, ends: set[int], *, skips_decimals: bool = False) -> list[tuple[int, SpokenText]]:
        """`text` cut after each run of the tokens `ends`, with the number of tokens of each part."""
        ids, spans = self.tokenizer.encode(text.text), self.tokenizer.spans(text.text)
        cuts = [(0, 0)]
        for index in range(1, len(ids)):
            if ids[index - 1] in ends and ids[index] not in ends:
                at = spans[index][0]
                # The official code decodes tokens, which drops a space at the beginning.
                before, after = text.text[:at], text.text[at:].removeprefix(" ")
                is_decimal = before[-1:] == "." and before[-2:-1].isdigit() and after[:1].isdigit()
                if not (skips_decimals and is_decimal):
                    cuts.append((index, at))
        cuts.append((len(ids), len(text.text)))
        return [
            (end - begin, text.part(start + text.text.startswith(" ", start, stop), stop))
            for (begin, start), (end, stop) in pairwise(cuts)
        ]


def _ended(text: SpokenText) -> SpokenText:
    """`text` with an end of a sentence: weak marks at its end, behind closing ones, become a period."""
    core = text.text.rstrip(_CLOSERS + " ")
    if not core or core[-1] in _TERMINAL:
        return text
    if core[-1] not in _WEAK:
        return joined([text, SpokenText("")], ".")
    kept = len(core.rstrip(_WEAK + " "))
    return joined([text.part(0, kept), text.part(len(core), len(text.text)).stripped()], ".")


@dataclass(frozen=True)
class PocketPrompt(RowPrompt):
    """A prompt after a voice, its `state`. `frames_after_end` is when the segment ends, and `threshold` what the logit
    must exceed for it."""

    frames_after_end: int = 0
    threshold: float = 0.0


class PromptBuilder:
    """Builds the prompts of chunks."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer) -> None:
        self.rules, self._tokenizer = TextRules(config, tokenizer), tokenizer
        names = {index: token for token, index in tokenizer.vocabulary.items() if index < CONTROLS}
        self.control_tokens, self.frame_id = ControlTokens(names), config.flow_lm.lookup_table.n_bins

    def build(self, text: str, controls: Controls, state: PocketVoice) -> PocketPrompt:
        """The prompt of the chunk `text`, spoken as `state`. Unless `ignore_eos`, the number of text ids limits the
        frames below `controls.max_frames`. Raises `InvalidRequest` for control tokens, and if nothing of the text is
        left."""
        check_text("text", text)
        prepared = self.rules.prepare(SpokenText(text)).text
        ids = self._tokenizer.encode(prepared)
        if not ids or not prepared.strip():
            raise InvalidRequest("text", text, "this checkpoint leaves out all of its characters")
        self.control_tokens.check("text", text, ids)
        if not controls.ignore_eos:
            controls = replace(controls, max_frames=min(most_frames(len(ids)), controls.max_frames))
        after = int(controls.options["frames_after_eos"])
        rows = np.array([*[0] * state.positions, *ids, self.frame_id], np.int64)[:, None]
        return PocketPrompt(
            controls,
            rows,
            prefix=state.names,
            text_start=state.positions,
            text_count=len(ids),
            state=state,
            frames_after_end=self.rules.frames_after_end(text) if after < 0 else after,
            threshold=float(controls.options["eos_threshold"]),
        )

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """The range (start, end) of characters that each token of a segment `text` covers."""
        prepared = self.rules.prepare(SpokenText(text))
        return [prepared.span(start, end) for start, end in self._tokenizer.spans(prepared.text)]


def most_frames(tokens: int) -> int:
    """The official limit of frames of a chunk of so many tokens."""
    return math.ceil((tokens / 3 + 2) * 12.5)


def find_tokenizer(config: YamlConfig, folder: Path) -> Path:
    """The tokeniser's file of the checkpoint in `folder`: in it, or where the releases that share one have it."""
    folders = [folder, folder.parent / "english_2026-09", folder.parent, folder.parent.parent]
    files = [one / config.tokenizer_file for one in folders]
    return next(filter(Path.is_file, files), files[0])
