"""Nucleus (top-p) sampling before temperature, with repetition-aware resampling.

A Triton kernel beside its torch reference. Every parameter is per request and on the device. Capturable; no sync."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.device import seeded
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options, stride_of
from sonoro.ops.optional import tl, triton
from sonoro.ops.sample import Sampling, gumbel_argmax, gumbel_noise

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

MIN_TEMPERATURE = 1e-5
"""Temperatures are clamped to at least this."""


class Resample(NamedTuple):
    """How an id that occurs among the last `window` ids is resampled, at temperature 1: `noise` [B, V] and `top_p`.
    Earlier ids of request b are `history[rows[b], first : length[b]]`, of `history` [N, T] int64."""

    noise: Tensor
    history: Tensor
    rows: Tensor
    length: Tensor
    top_p: float
    window: int
    first: int

    def recent(self) -> Tensor:
        """The last `window` ids [B, window] int64, -1 where there are fewer."""
        at = self.length[:, None] + torch.arange(-self.window, 0, device=self.rows.device)
        return self.history[self.rows[:, None], at.clamp(min=0)].masked_fill(at < self.first, -1)


def nucleus_argmax(logits: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """Sample one id [B] int64 per row of `logits` [B, V], with Gumbel `noise` [B, V].
    In descending order of probability (ties by id), keeps the ids whose cumulative probability is at most `top_p` (the
    one that crosses it is dropped), at most `top_k` of them, and always the first. A `top_p` of 1 and a `top_k` of 0
    keep all. Then `gumbel_argmax` of logits / temperature. Computed in float32."""
    temperature, top_k, top_p, is_greedy = sampling
    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    is_removed = (ordered.softmax(dim=-1).cumsum(dim=-1) > top_p) & (top_p < 1) | (rank >= top_k) & (top_k > 0)
    scaled = ordered.masked_fill(is_removed & (rank > 0), -torch.inf) / temperature.clamp(min=MIN_TEMPERATURE)
    return ids.gather(1, gumbel_argmax(scaled, noise.gather(1, ids), is_greedy)[:, None])[:, 0]


def sample_repetition_aware_reference(
    logits: Tensor,
    noise: Tensor,
    sampling: Sampling,
    table: Tensor,
    ids: Tensor,
    is_endless: Tensor | None = None,
    resample: Resample | None = None,
) -> Tensor:
    """`nucleus_argmax` into `ids` [B] int64, of any stride; returns their rows [B, W] of `table` [T, W], row 0 for ids
    from T on.
    `is_endless` [B, 1] bool bans the last id. With `resample`, an id that occurs among the recent ones is resampled
    once."""
    if is_endless is not None:
        is_end = torch.arange(logits.shape[1], device=logits.device) == logits.shape[1] - 1
        logits = logits.masked_fill(is_end & is_endless, -torch.inf)
    ids_sampled = nucleus_argmax(logits, noise, sampling)
    if resample is not None:
        one = torch.ones_like(sampling.top_p)
        wider = sampling._replace(temperature=one, top_p=resample.top_p * one)
        other = nucleus_argmax(logits, resample.noise, wider)
        ids_sampled = torch.where((resample.recent() == ids_sampled[:, None]).any(dim=1), other, ids_sampled)
    ids.copy_(ids_sampled)
    return F.embedding(ids_sampled.masked_fill(ids_sampled >= table.shape[0], 0), table)


if triton is not None:

    @triton.jit
    def _best_of(noisy, v, value, other_noisy, other_v, other_value):
        # Of two ids the one of the higher `noisy`, with its `value`; of equal ones the lower id.
        is_first = (noisy > other_noisy) | ((noisy == other_noisy) & (v < other_v))
        best = tl.where(is_first, noisy, other_noisy)
        return best, tl.where(is_first, v, other_v), tl.where(is_first, value, other_value)

    @triton.jit
    def _counted_best_of(
        count, mass, noisy, v, value, other_count, other_mass, other_noisy, other_v, other_value
    ):  # fmt: skip
        # With a count and a mass, which add up: one reduction costs little more than the count's alone.
        best, choice, best_value = _best_of(noisy, v, value, other_noisy, other_v, other_value)
        return count + other_count, mass + other_mass, best, choice, best_value

    @triton.jit
    def _nucleus_argmax(raw, noise, temp, k, p, greedy, vocabulary, BLOCK_V: tl.constexpr):
        v = tl.arange(0, BLOCK_V)
        noisy = tl.div_rn(raw, tl.zeros([BLOCK_V], tl.float32) + temp)
        if not greedy:
            noisy += tl.load(noise + v, mask=v < vocabulary, other=0.0)
        weight, top_p_mass = tl.zeros([BLOCK_V], tl.float32), 0.0
        if (p < 1) & (not greedy):
            weight = tl.exp(raw - tl.max(raw))
            top_p_mass = p * tl.sum(weight)
        best, choice, value = tl.reduce((noisy, v, raw), 0, _best_of)
        is_accepted = greedy | ((k <= 0) & (p >= 1))
        # Top-k and top-p keep a prefix of the order: if the choice is not kept, drop it and all ids after it, and try
        # the next best. Each iteration drops at least one; the first of all is always accepted.
        while not is_accepted:
            is_before = (raw > value) | ((raw == value) & (v < choice))
            noisy = tl.where(is_before, noisy, -float("inf"))
            kept = tl.where(is_before | (v == choice), weight, 0.0)
            rank, mass, next_best, next_choice, next_value = tl.reduce(
                (is_before.to(tl.int32), kept, noisy, v, raw), 0, _counted_best_of
            )
            is_accepted = (k <= 0) | (rank < k)
            if p < 1:
                is_accepted &= mass <= top_p_mass
            is_accepted |= (rank == 0) | (best == -float("inf"))
            if not is_accepted:
                best, choice, value = next_best, next_choice, next_value
        return tl.minimum(choice, vocabulary - 1).to(tl.int64)

    @triton.jit
    def _sample_kernel(
        logits, noise, temperature, top_k, top_p, is_greedy, table, ids, is_endless, resample_noise, history, rows,
        length, embedded, logits_stride, noise_stride, temperature_stride, top_k_stride, top_p_stride, greedy_stride,
        table_stride, ids_stride, endless_stride, resample_noise_stride, history_stride, history_step, resample_temp,
        resample_top_p, least, table_size, vocabulary,
        FIRST: tl.constexpr, WINDOW: tl.constexpr, BLOCK_W: tl.constexpr, EMBED_DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        row = tl.program_id(0).to(tl.int64)
        v = tl.arange(0, BLOCK_V)
        k, greedy = tl.load(top_k + row * top_k_stride), tl.load(is_greedy + row * greedy_stride)
        temp = tl.maximum(tl.load(temperature + row * temperature_stride), least)
        p = tl.load(top_p + row * top_p_stride)
        raw = tl.load(logits + row * logits_stride + v, mask=v < vocabulary, other=-float("inf")).to(tl.float32)
        if is_endless is not None:
            endless = tl.load(is_endless + row * endless_stride)
            raw = tl.where(endless & (v == vocabulary - 1), -float("inf"), raw)
        choice = _nucleus_argmax(raw, noise + row * noise_stride, temp, k, p, greedy, vocabulary, BLOCK_V)
        if WINDOW:
            offset = tl.arange(0, BLOCK_W)
            frame = tl.load(length + row) - WINDOW + offset
            is_there = (offset < WINDOW) & (frame >= FIRST)
            recent = tl.load(
                history + tl.load(rows + row) * history_stride + frame * history_step, mask=is_there, other=-1
            )
            if tl.sum((recent == choice).to(tl.int32)) > 0:
                again = resample_noise + row * resample_noise_stride
                choice = _nucleus_argmax(raw, again, resample_temp, k, resample_top_p, greedy, vocabulary, BLOCK_V)
        tl.store(ids + row * ids_stride, choice)
        column = tl.arange(0, BLOCK_D)
        entry = tl.where(choice < table_size, choice, 0) * table_stride
        value = tl.load(table + entry + column, mask=column < EMBED_DIM)
        tl.store(embedded + row * EMBED_DIM + column, value, mask=column < EMBED_DIM)


def sample_repetition_aware_kernel(
    logits: Tensor,
    noise: Tensor,
    sampling: Sampling,
    table: Tensor,
    ids: Tensor,
    is_endless: Tensor | None = None,
    resample: Resample | None = None,
) -> Tensor:
    """`sample_repetition_aware_reference` as one Triton kernel, a program per request; ids differ only where top-p's
    sums round differently."""
    (count, vocabulary), width = logits.shape, table.shape[1]
    embedded = torch.empty((count, width), dtype=table.dtype, device=logits.device)
    # Without resampling these pointers are not read.
    second = resample or Resample(noise, ids[:, None], ids, ids, 1.0, 0, 0)
    block = triton.next_power_of_2(vocabulary)
    _sample_kernel[(count,)](
        logits=logits, noise=noise, **sampling.launch_arguments, table=table, ids=ids, is_endless=is_endless,
        resample_noise=second.noise, history=second.history, rows=second.rows, length=second.length, embedded=embedded,
        logits_stride=logits.stride(0), noise_stride=noise.stride(0), table_stride=table.stride(0),
        ids_stride=ids.stride(0), endless_stride=stride_of(is_endless), resample_noise_stride=second.noise.stride(0),
        history_stride=second.history.stride(0), history_step=second.history.stride(1),
        resample_temp=1.0, resample_top_p=second.top_p, least=MIN_TEMPERATURE,
        table_size=table.shape[0], vocabulary=vocabulary, FIRST=second.first, WINDOW=second.window,
        BLOCK_W=triton.next_power_of_2(max(second.window, 1)), EMBED_DIM=width, BLOCK_D=triton.next_power_of_2(width),
        BLOCK_V=block, num_warps=max(1, min(16, block // 512)), **pdl_options(logits.device),
    )  # fmt: skip
    return embedded


def _can_run(logits: Tensor, noise: Tensor, sampling: Sampling, table: Tensor, ids: Tensor, *more: Any) -> bool:
    resample: Resample | None = more[1] if len(more) > 1 else None
    return (
        logits.numel() > 0
        and logits.shape[1] <= 16384
        and logits.stride(1) == noise.stride(1) == table.stride(1) == 1
        and 0 < table.shape[1] <= 8192
        and table.shape[0] > 0
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (resample is None or resample.noise.stride(1) == resample.rows.stride(0) == resample.length.stride(0) == 1)
    )


sample_repetition_aware = Operation(sample_repetition_aware_kernel, sample_repetition_aware_reference, _can_run)


def check_kernels(rows: int, vocabulary: int, table: Tensor, window: int) -> None:
    """Compare the sampling kernels with their references, for `rows` ids of `vocabulary` and `table` [T, W].
    Synchronises.
    Ids must be equal; noise may differ by the rounding of two logarithms."""
    device, index = table.device, torch.arange(rows, device=table.device)
    one, column = torch.ones(rows, 1, device=device), index[:, None]
    gumbel_noise.check(lambda: (index * 7919, index % 3, index, 2, vocabulary), tolerance=1e-5)
    noise, again_noise = gumbel_noise.reference(index, index, index, 2, vocabulary).unbind(1)
    logits = torch.randn(rows, vocabulary, device=device, generator=seeded(device))
    # From rows where top-p cuts, at a high temperature, to rows so flat that top-k does; the last id is likely.
    logits *= 4 - column % 4
    logits[::2, -1] = logits[::2].amax(dim=1)
    sampling = Sampling(4.0 * one, 30 * one.long(), 0.8 * one, column % 5 == 4)
    given = (logits.to(table.dtype), noise, sampling, table)
    history = torch.zeros_like(index)
    sample_repetition_aware.reference(*given, history)
    resample = Resample(again_noise, history[:, None].repeat(1, 8), index, index % 8, 0.9, window, 1)
    sample_repetition_aware.check(lambda: (*given, torch.zeros_like(index)), tolerance=0.0)
    sample_repetition_aware.check(lambda: (*given, torch.zeros_like(index), column % 3 == 0, resample), tolerance=0.0)
