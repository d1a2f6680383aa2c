"""Drawing ids for checkpoints that are filtered before they are heated, and that draw again what was just said.

A Triton kernel beside its torch reference. Every parameter is per row and lives on the device; nothing synchronises,
everything may be captured. Knows no model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.device import seeded
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import can_overlap
from sonoro.ops.sample import gumbel_noise, pick

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import launch_dependents, wait_for_inputs
except ImportError:
    triton = None

__all__ = ["Again", "check_kernels", "draw_nucleus", "draw_nucleus_kernel", "draw_nucleus_reference", "pick_nucleus"]

LEAST_TEMPERATURE = 1e-5
"""What a lower temperature counts as."""


class Again(NamedTuple):
    """The second draw of ids that were said among the last `window`: its `noise` [B, V], `temperature` and `top_p`.

    What row b has said is row `rows[b]` of `said` [N, T] int64, from `first` on and before `length[b]`.
    """

    noise: Tensor
    said: Tensor
    rows: Tensor
    length: Tensor
    temperature: float
    top_p: float
    window: int
    first: int

    def recent(self) -> Tensor:
        """What counts as just said, [B, window] int64, -1 where there is nothing."""
        at = self.length[:, None] + torch.arange(-self.window, 0, device=self.rows.device)
        return self.said[self.rows[:, None], at.clamp(min=0)].masked_fill(at < self.first, -1)


def pick_nucleus(  # noqa: PLR0917 (each is a column of its own)
    logits: Tensor, noise: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, is_greedy: Tensor
) -> Tensor:
    """One id per row of `logits` [B, V], [B] int64, by its probability with Gumbel `noise` [B, V]; the rest [B, 1].

    Of the ids in the order of their probabilities, of equal ones the lowest first, those are kept that add up to at
    most `top_p`, so the one that crosses it is not, and of those the first `top_k`; the first stays in any case. 1 and
    0 keep all. Then `pick` of the rest of logits / temperature. Computed in float32.
    """
    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    is_removed = (ordered.softmax(dim=-1).cumsum(dim=-1) > top_p) & (top_p < 1) | (rank >= top_k) & (top_k > 0)
    heated = ordered.masked_fill(is_removed & (rank > 0), -torch.inf) / temperature.clamp(min=LEAST_TEMPERATURE)
    return ids.gather(1, pick(heated, noise.gather(1, ids), is_greedy)[:, None])[:, 0]


def draw_nucleus_reference(  # noqa: PLR0917
    logits: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    is_greedy: Tensor,
    table: Tensor,
    ids: Tensor,
    is_endless: Tensor | None = None,
    again: Again | None = None,
) -> Tensor:
    """`pick_nucleus` into `ids` [B] int64 of any stride; the rows [B, W] of `table` [T, W] at them.

    An id beyond the table has its first row. The last id is not drawn where `is_endless` [B, 1]. With `again` ids that
    were just said are drawn once more, whatever comes of it.
    """
    if is_endless is not None:
        is_end = torch.arange(logits.shape[1], device=logits.device) == logits.shape[1] - 1
        logits = logits.masked_fill(is_end & is_endless, -torch.inf)
    drawn = pick_nucleus(logits, noise, temperature, top_k, top_p, is_greedy)
    if again is not None:
        heat, share = (torch.full_like(top_p, value) for value in (again.temperature, again.top_p))
        other = pick_nucleus(logits, again.noise, heat, top_k, share, is_greedy)
        drawn = torch.where((again.recent() == drawn[:, None]).any(dim=1), other, drawn)
    ids.copy_(drawn)
    return F.embedding(drawn.masked_fill(drawn >= table.shape[0], 0), table)


if triton is not None:

    @triton.jit
    def _pick(given, noise, heat, k, p, greedy, vocabulary, block: tl.constexpr):  # noqa: PLR0917
        v = tl.arange(0, block)
        noisy = tl.div_rn(given, tl.zeros([block], tl.float32) + heat)
        if not greedy:
            noisy += tl.load(noise + v, mask=v < vocabulary, other=0.0)
        weight, room = tl.zeros([block], tl.float32), 0.0
        if (p < 1) & (not greedy):
            weight = tl.exp(given - tl.max(given))
            room = p * tl.sum(weight)
        best, choice = tl.max(noisy, axis=0, return_indices=True)
        is_settled = greedy | ((k <= 0) & (p >= 1))
        # What is kept comes before what is not: if the choice is not kept, nothing after it is, so it goes with all
        # that, and the next best is tried. Each turn drops at least one; the first of all ends it.
        while not is_settled:
            value = tl.max(tl.where(v == choice, given, -float("inf")))
            is_before = (given > value) | ((given == value) & (v < choice))
            rank = tl.sum(is_before.to(tl.int32))
            is_settled = (k <= 0) | (rank < k)
            if p < 1:
                is_settled &= tl.sum(tl.where(is_before | (v == choice), weight, 0.0)) <= room
            is_settled |= (rank == 0) | (best == -float("inf"))
            if not is_settled:
                noisy = tl.where(is_before, noisy, -float("inf"))
                best, choice = tl.max(noisy, axis=0, return_indices=True)
        return tl.minimum(choice, vocabulary - 1).to(tl.int64)

    @triton.jit
    def _draw(  # noqa: PLR0917 (a kernel's arguments are positional)
        logits,
        noise,
        temperature,
        top_k,
        top_p,
        is_greedy,
        table,
        ids,
        is_endless,
        noise_again,
        said,
        rows,
        length,
        embedded,
        logits_stride,
        noise_stride,
        temperature_stride,
        top_k_stride,
        top_p_stride,
        greedy_stride,
        table_stride,
        ids_stride,
        endless_stride,
        again_stride,
        said_stride,
        said_step,
        heat_again,
        p_again,
        least,
        entries,
        vocabulary,
        first: tl.constexpr,
        window: tl.constexpr,
        window_block: tl.constexpr,
        width: tl.constexpr,
        width_block: tl.constexpr,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        line = tl.program_id(0).to(tl.int64)
        v = tl.arange(0, block)
        k, greedy = tl.load(top_k + line * top_k_stride), tl.load(is_greedy + line * greedy_stride)
        heat = tl.maximum(tl.load(temperature + line * temperature_stride), least)
        p = tl.load(top_p + line * top_p_stride)
        given = tl.load(logits + line * logits_stride + v, mask=v < vocabulary, other=-float("inf")).to(tl.float32)
        if is_endless is not None:
            endless = tl.load(is_endless + line * endless_stride)
            given = tl.where(endless & (v == vocabulary - 1), -float("inf"), given)
        choice = _pick(given, noise + line * noise_stride, heat, k, p, greedy, vocabulary, block)
        if window:
            place = tl.arange(0, window_block)
            at = tl.load(length + line) - window + place
            is_there = (place < window) & (at >= first)
            recent = tl.load(said + tl.load(rows + line) * said_stride + at * said_step, mask=is_there, other=-1)
            if tl.sum((recent == choice).to(tl.int32)) > 0:
                choice = _pick(
                    given, noise_again + line * again_stride, heat_again, k, p_again, greedy, vocabulary, block
                )
        tl.store(ids + line * ids_stride, choice)
        column = tl.arange(0, width_block)
        entry = tl.where(choice < entries, choice, 0) * table_stride
        value = tl.load(table + entry + column, mask=column < width)
        tl.store(embedded + line * width + column, value, mask=column < width)


def draw_nucleus_kernel(  # noqa: PLR0917
    logits: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    is_greedy: Tensor,
    table: Tensor,
    ids: Tensor,
    is_endless: Tensor | None = None,
    again: Again | None = None,
) -> Tensor:
    """`draw_nucleus_reference` as one Triton kernel, a program per row; ids differ only where top-p's sums round
    otherwise.
    """
    (count, vocabulary), width = logits.shape, table.shape[1]
    embedded = torch.empty((count, width), dtype=table.dtype, device=logits.device)
    # Without a second draw nothing is read for it: any pointers serve.
    second = again or Again(noise, ids[:, None], ids, ids, 1.0, 1.0, 0, 0)
    given = (logits, noise, temperature, top_k, top_p, is_greedy, table, ids)
    overlap, block = can_overlap(logits.device), triton.next_power_of_2(vocabulary)
    _draw[(count,)](
        *given,
        is_endless,
        *second[:4],
        embedded,
        *(tensor.stride(0) for tensor in given),
        0 if is_endless is None else is_endless.stride(0),
        second.noise.stride(0),
        *second.said.stride(),
        second.temperature,
        second.top_p,
        LEAST_TEMPERATURE,
        table.shape[0],
        vocabulary,
        second.first,
        second.window,
        triton.next_power_of_2(max(second.window, 1)),
        width,
        triton.next_power_of_2(width),
        block,
        overlap,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=overlap,
    )
    return embedded


def _can_draw(  # noqa: PLR0917
    logits: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    is_greedy: Tensor,
    table: Tensor,
    ids: Tensor,
    is_endless: Tensor | None = None,
    again: Again | None = None,
) -> bool:
    return (
        logits.numel() > 0
        and logits.shape[1] <= 16384
        and logits.stride(1) == noise.stride(1) == table.stride(1) == 1
        and 0 < table.shape[1] <= 8192
        and table.shape[0] > 0
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (again is None or again.noise.stride(1) == again.rows.stride(0) == again.length.stride(0) == 1)
    )


draw_nucleus = Operation("draw_nucleus", draw_nucleus_kernel, draw_nucleus_reference, _can_draw)


def check_kernels(rows: int, vocabulary: int, table: Tensor, window: int) -> None:
    """Compare the kernels that draw `rows` ids out of `vocabulary`, rows of `table`, with references. Synchronises.

    Draws must be the same id by id; noise may differ by the rounding of two logarithms.
    """
    device, index = table.device, torch.arange(rows, device=table.device)
    one, column = torch.ones(rows, 1, device=device), index[:, None]
    gumbel_noise.check(lambda: (index * 7919, index % 3, index, 2, vocabulary), tolerance=1e-5)
    noise, again_noise = gumbel_noise.reference(index, index, index, 2, vocabulary).unbind(1)
    logits = torch.randn(rows, vocabulary, device=device, generator=seeded(device))
    # From rows that top-p bounds, heated so that it matters, to rows so flat that top-k does; the last id is likely.
    logits *= 4 - column % 4
    logits[::2, -1] = logits[::2].amax(dim=1)
    given = (logits.to(table.dtype), noise, 4.0 * one, 30 * one.long(), 0.8 * one, column % 5 == 4, table)
    said = torch.zeros_like(index)
    draw_nucleus.reference(*given, said)
    again = Again(again_noise, said[:, None].repeat(1, 8), index, index % 8, 4.0, 0.9, window, 1)
    draw_nucleus.check(lambda: (*given, torch.zeros_like(index)), tolerance=0.0)
    draw_nucleus.check(lambda: (*given, torch.zeros_like(index), column % 3 == 0, again), tolerance=0.0)
