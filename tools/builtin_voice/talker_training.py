"""Train the built-in voice's talker and code predictor on (text ids, codes) pairs, with the engine's own modules.

A row is one input of the talker: a text id and K codec ids whose embeddings are summed. Prompt and frames of an
utterance are laid out here on the device, for a batch of similar lengths; each utterance has one of two text layouts
and one of the languages. Noise is applied to the frames that are fed back.

Batches have one of a few widths, and a batch size for each, so that each is captured once as a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from builtin_voice.forwards import predictor_logits, talker_forward
from builtin_voice.settings import Noise, TalkerTraining
from builtin_voice.training import Average, Captured, Run, adam, descend, set_rate, steps_of
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import ModelConfig

__all__ = [
    "IGNORED",
    "WIDTHS",
    "Batch",
    "Forwards",
    "Layout",
    "Plan",
    "Rows",
    "Utterances",
    "assemble",
    "batches",
    "corrupt",
    "judge",
    "losses",
    "train_talker",
]

IGNORED = -100
"""The target of a row without a prediction."""

_MOST_JUDGED = 8192
"""Most frames whose other codebooks are evaluated at once."""

NO_NOISE = Noise(codes=0.0, frames=0.0, dropout=0.0)

WIDTHS = (*range(40, 200, 16), *range(208, 336, 32), 336, 400, 480)
"""Widths of batches: most rows of an utterance; multiples of 8, as compiled kernels need."""

_LOGGED_EVERY = 500
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Utterances:
    """N utterances on the device, padded on the right.

    `text` [N, L] and `codes` [N, T, K] of any integer dtype with their lengths [N] int64; `speaker` [N] int64 are ids
    of the talker's table.
    """

    text: Tensor
    text_lengths: Tensor
    codes: Tensor
    frame_lengths: Tensor
    speaker: Tensor

    def take(self, rows: Tensor, width: int | None = None) -> Utterances:
        """The utterances `rows` [B] int64, cut to `width` or to the longest of them; their ids as int64."""
        text_lengths, frame_lengths = self.text_lengths[rows], self.frame_lengths[rows]
        text, codes = self.text[rows], self.codes[rows]
        return Utterances(
            text[:, : width or int(text_lengths.max())].long(),
            text_lengths,
            codes[:, : width or int(frame_lengths.max())].long(),
            frame_lengths,
            self.speaker[rows],
        )


@dataclass(frozen=True)
class Layout:
    """Prompt layout: the ids of `config`, and that of a line break; tables are on `device`."""

    config: ModelConfig
    newline_id: int
    device: torch.device = _CPU

    @property
    def languages(self) -> list[int | None]:
        """Ids of all languages by number; the first, None, is `auto`."""
        return [None, *self.config.talker_config.codec_language_id.values()]

    def tags(self, language_id: int | None) -> list[int]:
        """The control ids of a language."""
        talker = self.config.talker_config
        if language_id is None:
            return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        return [talker.codec_think_id, talker.codec_think_bos_id, language_id, talker.codec_think_eos_id]

    @cached_property
    def openings(self) -> tuple[Tensor, Tensor, Tensor]:
        """The start of every prompt, by number of language: text ids and codes of codebook 0 [N, longest],
        right-aligned (-1: none, also for the speaker), and their number of rows [N]."""
        config, talker = self.config, self.config.talker_config
        pad = config.tts_pad_token_id
        head = [config.im_start_token_id, config.assistant_token_id, self.newline_id]
        tags = [self.tags(language_id) for language_id in self.languages]
        text = [[*head, *[pad] * (len(row) + 1), config.tts_bos_token_id] for row in tags]
        codes = [[*[-1] * len(head), *row, -1, talker.codec_pad_id] for row in tags]
        lengths = [len(row) for row in text]
        longest = max(lengths)
        text, codes = ([[-1] * (longest - len(row)) + row for row in rows] for rows in (text, codes))
        return tuple(torch.tensor(values, device=self.device) for values in (text, codes, lengths))  # type: ignore[return-value]


@dataclass(frozen=True)
class Rows:
    """Inputs and targets of a batch: `text_rows` [B, P] and `code_rows` [B, P, K] (-1: none), targets of codebook 0 [B,
    P] (`IGNORED` for none), and the index of the frame predicted at a row, [B, P] (-1: none)."""

    text_rows: Tensor
    code_rows: Tensor
    targets: Tensor
    frame: Tensor


def assemble(
    batch: Utterances, layout: Layout, *, is_streaming: Tensor, language: Tensor, width: int | None = None
) -> Rows:
    """The rows of a batch as the engine would feed them, padded on the right.

    `is_streaming` [B] bool selects the text layout and `language` [B] int64 the number of the language of each
    utterance. P is `width`, or what the longest needs. Capturable with a `width`."""
    config, talker = layout.config, layout.config.talker_config
    books, device = batch.codes.shape[2], batch.text.device
    opening_text, opening_codes, openings = layout.openings
    is_streaming, prefix = is_streaming[:, None], openings[language][:, None]
    lengths, frames = batch.text_lengths[:, None], batch.frame_lengths[:, None]
    body = torch.where(is_streaming, 1, lengths + 2)
    total = width or int((prefix + body + frames).max())
    column = torch.arange(total, device=device)[None] - prefix
    frame = column - body  # the frame whose codes this row has; the row predicts frame + 1
    is_opening = column < 0
    opening = (column + opening_text.shape[1]).clamp(0, opening_text.shape[1] - 1)

    word = torch.where(is_streaming, frame + 1, column)
    text_rows = torch.where(
        word < lengths,
        batch.text.gather(1, word.clamp(0, batch.text.shape[1] - 1)),
        torch.where(word == lengths, config.tts_eos_token_id, config.tts_pad_token_id),
    )
    text_rows = torch.where(is_opening, opening_text[language].gather(1, opening), text_rows)

    first = torch.where(frame == -1, talker.codec_bos_id, talker.codec_pad_id)
    first = torch.where(is_opening, opening_codes[language].gather(1, opening), first)
    first = torch.where(column == -2, batch.speaker[:, None], first)
    prompt = torch.cat((first[..., None], torch.full_like(first, -1)[..., None].expand(-1, -1, books - 1)), dim=-1)
    fed_back = batch.codes.gather(1, frame.clamp(0, batch.codes.shape[1] - 1)[..., None].expand(-1, -1, books))
    code_rows = torch.where((~is_opening & (frame >= 0))[..., None], fed_back, prompt)

    decided = frame + 1
    is_frame = ~is_opening & (decided >= 0) & (decided < frames)
    next_codes = batch.codes[..., 0].gather(1, decided.clamp(0, batch.codes.shape[1] - 1))
    targets = torch.where(is_frame, next_codes, IGNORED)
    targets = torch.where(~is_opening & (decided == frames), talker.codec_eos_token_id, targets)
    return Rows(text_rows, code_rows, targets, torch.where(is_frame, decided, -1))


class Batch(NamedTuple):
    """The utterances `picks` [B] int64, each of at most `width` rows."""

    picks: Tensor
    width: int


def batches(lengths: Tensor, positions: int, generator: torch.Generator) -> list[Batch]:
    """All utterances of at most `WIDTHS[-1]` of `lengths` [N] rows, shuffled, in batches of similar lengths.

    All batches of a width have the same size, at most `positions` rows and at least one utterance; the last is filled
    up with others of that width."""
    found: list[Batch] = []
    for below, width in itertools.pairwise((0, *WIDTHS)):
        fitting = ((lengths > below) & (lengths <= width)).nonzero()[:, 0]
        if not len(fitting):
            continue
        size = max(1, positions // width)
        shuffled = fitting[torch.randperm(len(fitting), generator=generator)]
        more = torch.randint(len(fitting), (-len(fitting) % size,), generator=generator)
        found += [Batch(picks, width) for picks in torch.cat((shuffled, fitting[more])).split(size)]
    return [found[index] for index in torch.randperm(len(found), generator=generator).tolist()]


class Plan:
    """The batch of each step: epochs over all utterances, with new batches in each."""

    def __init__(self, lengths: Tensor, training: TalkerTraining) -> None:
        self._lengths, self._positions = lengths, training.positions
        self._epochs = itertools.count(training.seed)
        self._first, self._batches = 0, self._next_epoch()

    def batch(self, step: int) -> Batch:
        """The utterances of step `step`; steps must not decrease from call to call."""
        while step - self._first >= len(self._batches):
            self._first += len(self._batches)
            self._batches = self._next_epoch()
        return self._batches[step - self._first]

    def _next_epoch(self) -> list[Batch]:
        return batches(self._lengths, self._positions, torch.Generator().manual_seed(next(self._epochs)))


@dataclass(frozen=True)
class Forwards:
    """The two training forwards, compiled where that is faster."""

    first: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rest: Callable[[Tensor, Tensor, Tensor, float], Tensor]

    @classmethod
    def of(cls, talker: Talker, *, is_compiled: bool) -> Forwards:
        def first(text_rows: Tensor, code_rows: Tensor, targets: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
            rows = F.dropout(talker.embed_rows(text_rows, code_rows), dropout)
            hidden, logits = talker_forward(talker, rows)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
            return hidden, loss

        def rest(hidden: Tensor, given: Tensor, frames: Tensor, dropout: float) -> Tensor:
            logits = predictor_logits(talker, F.dropout(hidden, dropout), given)
            return F.cross_entropy(logits.flatten(0, 1).float(), frames[:, 1:].flatten(), ignore_index=IGNORED)

        if is_compiled:
            return cls(torch.compile(first, dynamic=True), torch.compile(rest, dynamic=False))
        return cls(first, rest)


def corrupt(codes: Tensor, share: float, size: int) -> Tensor:
    """`codes` with a `share` of them replaced by random codes below `size`; negative ones stay."""
    drawn = torch.randint_like(codes, size)
    return torch.where((torch.rand_like(codes, dtype=torch.float32) < share) & (codes >= 0), drawn, codes)


def losses(
    forwards: Forwards, rows: Rows, codes: Tensor, noise: Noise, size: int, *, kept: int | None = None
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of codebook 0 (end included) and of the other codebooks: of the first 8,192 frames or,
    capturable, of about `kept` random ones.

    `noise` imitates the errors of free-running generation: some frames fed back are blank and some codes wrong, as are
    codes given to the predictor within a frame. Targets and prompt rows are unchanged.
    """
    carries = (rows.frame > 0) | ((rows.frame < 0) & (rows.targets >= 0))  # rows that feed a frame back
    code_rows = torch.where(carries[..., None], corrupt(rows.code_rows, noise.codes, size), rows.code_rows)
    blank = carries & (torch.rand_like(carries, dtype=torch.float32) < noise.frames)
    code_rows = code_rows.masked_fill(blank[..., None], -1)
    hidden, first = forwards.first(rows.text_rows, code_rows, rows.targets, noise.dropout)
    decided = rows.frame.flatten()
    if kept is None:
        # GPU attention kernels limit the number of sequences.
        chosen = (decided >= 0).nonzero()[:_MOST_JUDGED, 0]
    else:
        # Rows without a prediction sort last, and have no target.
        chosen = (
            torch.where(decided >= 0, torch.rand_like(decided, dtype=torch.float32), -1.0)
            .topk(kept, sorted=False)
            .indices
        )
    at_row, of_frame = chosen // rows.frame.shape[1], decided[chosen]
    frames = codes[at_row, of_frame.clamp_min(0)]
    given, wanted = corrupt(frames, noise.codes, size), frames.masked_fill((of_frame < 0)[:, None], IGNORED)
    return first, forwards.rest(hidden.flatten(0, 1)[chosen], given, wanted, noise.dropout)


class Lesson:
    """One training step of the talker on the utterances `picks` [B] of `data`, captured once for each width."""

    def __init__(self, talker: Talker, data: Utterances, layout: Layout, training: TalkerTraining) -> None:
        self.talker, self._data, self._layout, self._training = talker, data, layout, training
        self.optimizer = adam(talker, (0.9, 0.98), training.weight_decay)
        self._device = data.text.device
        self._forwards = Forwards.of(talker, is_compiled=self._device.type == "cuda")
        self._size = talker.config.code_predictor_config.vocab_size
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._captured: dict[int, Captured] = {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Run the step; returns its metrics, valid until the next one."""
        width = batch.width
        if width not in self._captured:
            self._captured[width] = Captured(lambda picks: self._learn(picks, width), 2, self._pool)
        return self._captured[width](batch.picks.to(self._device, non_blocking=True))

    def _learn(self, picks: Tensor, width: int) -> dict[str, Tensor]:
        utterances = self._data.take(picks, width)
        number = torch.randint(2 * len(self._layout.languages), picks.shape, device=self._device)
        rows = assemble(utterances, self._layout, is_streaming=number % 2 == 0, language=number // 2, width=width)
        # Equal for all widths, or it would be compiled for each.
        kept = max(1, round(self._training.kept * self._training.positions))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            first, rest = losses(self._forwards, rows, utterances.codes, self._training.noise, self._size, kept=kept)
        norm = descend(self.talker, self.optimizer, first + self._training.rest_weight * rest)
        return {"first": first.detach(), "rest": rest.detach(), "gradient": norm}


@torch.no_grad()
def judge(average: Talker, held_out: Utterances, layout: Layout) -> dict[str, float]:
    """Both validation losses on `held_out`, without noise."""
    zeros = torch.zeros_like(held_out.text_lengths)
    rows = assemble(held_out, layout, is_streaming=zeros > 0, language=zeros)
    size = layout.config.talker_config.code_predictor_config.vocab_size
    first, rest = losses(Forwards.of(average, is_compiled=False), rows, held_out.codes, NO_NOISE, size)
    return {"held_out_first": first.item(), "held_out_rest": rest.item()}


def train_talker(
    talker: Talker, data: Utterances, held_out: Utterances, layout: Layout, *, training: TalkerTraining, run: Run
) -> Talker:
    """Train on `data`; returns the exponential average of the weights. Raises `Unfinished` when the time is up."""
    device = data.text.device
    talker.train()
    lesson, average = Lesson(talker, data, layout, training), Average(talker, training.average_decay)
    longest_opening = int(layout.openings[2].max())
    plan = Plan((data.text_lengths + data.frame_lengths).cpu() + longest_opening + 2, training)
    parts = {"talker": talker, "average": average, "optimizer": lesson.optimizer}
    for step in steps_of(training, run, parts, lambda: {"talker": average.state_dict()}):
        set_rate(lesson.optimizer, step.rate)
        figures = lesson(plan.batch(step.number))
        average.follow(step.number)
        if step.is_logged(_LOGGED_EVERY):
            shown = {name: value.item() for name, value in figures.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                run.log({"step": step.number} | shown | judge(average.module, held_out, layout))
    return average.module
