"""Trains the built-in voice's talker and code predictor on (text ids, codes) pairs, through the engine's own modules.

A row is what the engine feeds: a text id and K codec ids whose embeddings are summed. Prompt rows and frame rows are
one table of ids, laid out here on the device for a batch of like lengths; the two text layouts and the languages
take turns. In training, noise spoils the frames that are fed back.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from builtin_voice.settings import Noise, TalkerTraining
from builtin_voice.training import Run, adam, descend, set_rate, steps_of
from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.config import ModelConfig

__all__ = [
    "IGNORED",
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
"""The target of a row that decides nothing."""

NO_NOISE = Noise(codes=0.0, frames=0.0, dropout=0.0, kept=1.0)


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

    def take(self, rows: Tensor) -> Utterances:
        """The utterances `rows` [B] int64, cut to the longest of them; their ids as int64."""
        text_lengths, frame_lengths = self.text_lengths[rows], self.frame_lengths[rows]
        text, codes = self.text[rows], self.codes[rows]
        return Utterances(
            text[:, : int(text_lengths.max())].long(),
            text_lengths,
            codes[:, : int(frame_lengths.max())].long(),
            frame_lengths,
            self.speaker[rows],
        )


@dataclass(frozen=True)
class Layout:
    """What a prompt is laid out by: the ids of `config`, and that of a line break."""

    config: ModelConfig
    newline_id: int

    def tags(self, language_id: int | None) -> list[int]:
        """The control ids of a language; None is `auto`."""
        talker = self.config.talker_config
        if language_id is None:
            return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        return [talker.codec_think_id, talker.codec_think_bos_id, language_id, talker.codec_think_eos_id]


@dataclass(frozen=True)
class Rows:
    """A batch as the talker sees it: `text_rows` [B, P] and `code_rows` [B, P, K] (-1: nothing), targets of codebook 0
    [B, P] (`IGNORED` where no decision is made), and the frame decided at a row, [B, P] (-1: none)."""

    text_rows: Tensor
    code_rows: Tensor
    targets: Tensor
    frame: Tensor


def assemble(batch: Utterances, layout: Layout, *, is_streaming: bool, language_id: int | None) -> Rows:
    """The rows of a batch as the engine would prepare and feed them; those after an utterance's last are padding."""
    config, talker = layout.config, layout.config.talker_config
    count, books = batch.codes.shape[0], batch.codes.shape[2]
    device = batch.text.device
    tags = layout.tags(language_id)
    head = [config.im_start_token_id, config.assistant_token_id, layout.newline_id]
    prefix = len(head) + len(tags) + 2
    lengths = batch.text_lengths[:, None]
    body = 1 if is_streaming else batch.text_lengths[:, None] + 2
    total = int((prefix + body + batch.frame_lengths[:, None]).max())
    column = torch.arange(total, device=device)[None].expand(count, -1) - prefix
    frame = column - body  # the frame whose codes this row carries; the row decides frame + 1
    word = frame + 1 if is_streaming else column
    text_body = torch.where(
        word < lengths,
        batch.text.gather(1, word.clamp(0, batch.text.shape[1] - 1)),
        torch.where(word == lengths, config.tts_eos_token_id, config.tts_pad_token_id),
    )
    text_prefix = torch.tensor(
        [*head, *[config.tts_pad_token_id] * (len(tags) + 1), config.tts_bos_token_id], device=device
    )
    text_rows = text_body.clone()
    text_rows[:, :prefix] = text_prefix

    code_rows = torch.full((count, total, books), -1, dtype=torch.long, device=device)
    code_rows[:, len(head) : len(head) + len(tags), 0] = torch.tensor(tags, device=device)
    code_rows[:, prefix - 2, 0] = batch.speaker
    code_rows[:, prefix - 1, 0] = talker.codec_pad_id
    inside = column >= 0
    code_rows[:, :, 0] = torch.where(inside & (frame < -1), talker.codec_pad_id, code_rows[:, :, 0])
    code_rows[:, :, 0] = torch.where(inside & (frame == -1), talker.codec_bos_id, code_rows[:, :, 0])
    gathered = batch.codes.gather(1, frame.clamp(0, batch.codes.shape[1] - 1)[..., None].expand(-1, -1, books))
    code_rows = torch.where((inside & (frame >= 0))[..., None], gathered, code_rows)

    decided = frame + 1
    frames = batch.frame_lengths[:, None]
    is_frame = inside & (decided >= 0) & (decided < frames)
    next_codes = batch.codes[..., 0].gather(1, decided.clamp(0, batch.codes.shape[1] - 1))
    targets = torch.where(is_frame, next_codes, IGNORED)
    targets = torch.where(inside & (decided == frames), talker.codec_eos_token_id, targets)
    return Rows(text_rows, code_rows, targets, torch.where(is_frame, decided, -1))


def batches(lengths: Tensor, positions: int, generator: torch.Generator) -> list[Tensor]:
    """Indices of all utterances in batches of like `lengths` [N], shuffled.

    A batch is one utterance, or has at most `positions` rows when padded to its last; none of it is 6 rows longer. The
    longest of all is not left over alone where two of it fit: a batch of one would be compiled anew."""
    jitter = torch.rand(lengths.shape, generator=generator) * 6
    order = torch.argsort(lengths + jitter)
    found: list[Tensor] = []
    start = 0
    sizes = lengths[order].tolist()
    while start < len(sizes):
        stop = start + 1
        while stop < len(sizes) and (stop - start + 1) * sizes[stop] <= positions:
            stop += 1
        found.append(order[start:stop])
        start = stop
    if len(found) > 1 and len(found[-1]) == 1 and len(found[-2]) > 2 and 2 * sizes[-1] <= positions:
        found[-2:] = [found[-2][:-1], order[-2:]]
    return [found[index] for index in torch.randperm(len(found), generator=generator).tolist()]


class Plan:
    """Which utterances each step takes: all of them once, in batches, then again in other batches."""

    def __init__(self, lengths: Tensor, training: TalkerTraining) -> None:
        self._lengths, self._positions = lengths, training.positions
        self._epochs = itertools.count(training.seed)
        self._first, self._batches = 0, self._next_epoch()

    def batch(self, step: int) -> Tensor:
        """The utterances of step `step`, which is not before the last one asked for."""
        while step - self._first >= len(self._batches):
            self._first += len(self._batches)
            self._batches = self._next_epoch()
        return self._batches[step - self._first]

    def _next_epoch(self) -> list[Tensor]:
        return batches(self._lengths, self._positions, torch.Generator().manual_seed(next(self._epochs)))


@dataclass(frozen=True)
class Forwards:
    """The two training forwards, compiled where that pays."""

    first: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rest: Callable[[Tensor, Tensor, Tensor, float], Tensor]

    @classmethod
    def of(cls, talker: Talker, *, is_compiled: bool) -> Forwards:
        def first(text_rows: Tensor, code_rows: Tensor, targets: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
            rows = F.dropout(talker.embed_rows(text_rows, code_rows), dropout)
            hidden, logits = talker.talker_forward(rows)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
            return hidden, loss

        def rest(hidden: Tensor, given: Tensor, frames: Tensor, dropout: float) -> Tensor:
            logits = talker.predictor_logits(F.dropout(hidden, dropout), given)
            return F.cross_entropy(logits.flatten(0, 1).float(), frames[:, 1:].flatten())

        if is_compiled:
            return cls(torch.compile(first, dynamic=True), torch.compile(rest, dynamic=True))
        return cls(first, rest)


def corrupt(codes: Tensor, share: float, size: int) -> Tensor:
    """`codes` with `share` of them drawn anew from `size`, those below 0 left as they are."""
    drawn = torch.randint_like(codes, size)
    return torch.where((torch.rand_like(codes, dtype=torch.float32) < share) & (codes >= 0), drawn, codes)


def losses(forwards: Forwards, rows: Rows, codes: Tensor, noise: Noise, size: int) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of codebook 0 (end included) and of the other codebooks, over a share of the frames.

    `noise` makes the past unsure, as it is when the model hears itself: of the frames fed back some are blank and some
    codes wrong, as are codes given to the predictor within a frame. Targets and prompt rows stay.
    """
    carries = (rows.frame > 0) | ((rows.frame < 0) & (rows.targets >= 0))  # rows that feed a frame back
    code_rows = torch.where(carries[..., None], corrupt(rows.code_rows, noise.codes, size), rows.code_rows)
    blank = carries & (torch.rand_like(carries, dtype=torch.float32) < noise.frames)
    code_rows = code_rows.masked_fill(blank[..., None], -1)
    hidden, first = forwards.first(rows.text_rows, code_rows, rows.targets, noise.dropout)
    chosen = (rows.frame >= 0).nonzero()
    keep = torch.rand(chosen.shape[0], device=chosen.device) < noise.kept
    at_row, at_column = chosen[keep].unbind(-1)
    frames = codes[at_row, rows.frame[at_row, at_column]]
    return first, forwards.rest(hidden[at_row, at_column], corrupt(frames, noise.codes, size), frames, noise.dropout)


@torch.no_grad()
def follow(average: Talker, talker: Talker, step: int, decay: float) -> None:
    """Move the weights of `average` towards those of `talker`: by 1 - `decay`, and faster in the first steps."""
    weight = 1 - min(decay, (step + 1) / (step + 10))
    torch._foreach_lerp_(list(average.parameters()), list(talker.parameters()), weight)


@torch.no_grad()
def judge(average: Talker, held_out: Utterances, layout: Layout) -> dict[str, float]:
    """Both losses on `held_out`, without noise."""
    rows = assemble(held_out, layout, is_streaming=False, language_id=None)
    size = layout.config.talker_config.code_predictor_config.vocab_size
    first, rest = losses(Forwards.of(average, is_compiled=False), rows, held_out.codes, NO_NOISE, size)
    return {"held_out_first": first.item(), "held_out_rest": rest.item()}


def train_talker(
    talker: Talker, data: Utterances, held_out: Utterances, layout: Layout, *, training: TalkerTraining, run: Run
) -> Talker:
    """Train on `data`; returns the exponential average of the weights. Raises `Unfinished` when the time is up."""
    device = data.text.device
    talker.train()
    forwards = Forwards.of(talker, is_compiled=device.type == "cuda")
    average = copy.deepcopy(talker).eval()
    optimizer = adam(talker, (0.9, 0.98), training.weight_decay)
    size = talker.config.code_predictor_config.vocab_size
    languages = [None, *talker.config.codec_language_id.values()]
    plan = Plan((data.text_lengths + data.frame_lengths).cpu(), training)
    parts = {"talker": talker, "average": average, "optimizer": optimizer}
    for step in steps_of(training, run, parts):
        batch = data.take(plan.batch(step.number).to(device))
        language_id = languages[step.number // 2 % len(languages)]
        rows = assemble(batch, layout, is_streaming=step.number % 2 == 0, language_id=language_id)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            first, rest = losses(forwards, rows, batch.codes, training.noise, size)
        set_rate(optimizer, step.rate)
        norm = descend(talker, optimizer, first + training.rest_weight * rest)
        follow(average, talker, step.number, training.average_decay)
        if step.number % 500 == 0 or step.is_last:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                found = judge(average, held_out, layout)
            figures = {"first": first.item(), "rest": rest.item(), "gradient": norm.item()}
            run.log({"step": step.number} | figures | found)
    return average
