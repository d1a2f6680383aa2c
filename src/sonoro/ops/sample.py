"""Choosing one id per row: addressed Gumbel noise, logit processors and the pick; Triton kernels beside references.

Every parameter is per row and lives on the device, so a batch may mix greedy and random rows. Nothing here synchronises
a GPU or depends on its values on the host; everything may be captured. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import can_overlap

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import launch_dependents, wait_for_inputs
except ImportError:
    triton = None

__all__ = [
    "draw",
    "draw_kernel",
    "draw_reference",
    "gumbel_noise",
    "gumbel_noise_kernel",
    "gumbel_noise_reference",
    "keep_top_k",
    "keep_top_p",
    "mask_logits",
    "mask_logits_kernel",
    "mask_logits_reference",
    "penalize_seen",
    "philox_words",
    "pick",
]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_words(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of each counter: Philox4x32-10.

    `counter` (four) and `key` (two) are int64 tensors whose low 32 bits count; they broadcast against one another, and
    parts that vary along one axis only are cheap to give unexpanded. Words are int64 in [0, 2**32).
    Follows Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    a, b, c, d = (word & _WORD for word in counter)
    left, right = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap in int64, which leaves all their bits right. `b`, `d` and the keys keep garbage
        # above bit 31: they are only ever xored, and the mask comes after.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = ((second >> 32) ^ (b ^ left)) & _WORD
        c = ((first >> 32) ^ (d ^ right)) & _WORD
        b, d = second, first
        left, right = left + _KEY_STEPS[0], right + _KEY_STEPS[1]
    return a, b & _WORD, c, d & _WORD


def gumbel_noise_reference(seed: Tensor, segment: Tensor, frame: Tensor, codebooks: int, vocabulary: int) -> Tensor:
    """Gumbel noise [B, codebooks, vocabulary] float32 of one frame, addressed by int64 rows `seed`, `segment`, `frame`.

    Entry (codebook, v) of a row is a function of that row's three numbers, the codebook and v alone: key = seed (low
    word, high word), counter = (v // 4, codebook, frame, segment), word v % 4, u = ((word >> 9) + 0.5) / 2**23.
    """
    row_seed, row_segment, row_frame = (rows[:, None, None] for rows in (seed, segment, frame))
    book = torch.arange(codebooks, device=seed.device)[:, None]
    block = torch.arange(-(-vocabulary // 4), device=seed.device)
    words = philox_words((block, book, row_frame, row_segment), (row_seed, row_seed >> 32))
    word = torch.stack(words, dim=-1).flatten(-2)[..., :vocabulary]
    uniform = (word >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def penalize_seen(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """`logits` [B, V] with those of `seen` [B, V] bool made less likely by `penalty` [B, 1] (1 changes nothing)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, top_k: Tensor, limit: int) -> Tensor:
    """`logits` [B, V] with those below the row's `top_k`-th [B, 1] int64 at -inf; ties with it stay; 0 keeps all.

    `limit` must not be smaller than any `top_k` that is below V: the caller knows it without asking the device.
    """
    best = logits.topk(min(limit, logits.shape[-1]), dim=-1).values
    smallest = best.gather(-1, (top_k - 1).clamp(0, best.shape[-1] - 1))
    return logits.masked_fill((logits < smallest) & (top_k > 0), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """`logits` [B, V] with the least likely at -inf, as long as those dropped sum to at most 1 - `top_p` [B, 1].

    Equal values stay or go together, and the largest stay. A row with `top_p` 1 keeps every id that can be drawn. Costs
    a sort.
    """
    ascending = logits.sort(dim=-1).values
    dropped = (ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p).sum(dim=-1, keepdim=True)
    smallest = ascending.gather(-1, dropped.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill(logits < smallest, -torch.inf)


def pick(logits: Tensor, noise: Tensor, is_greedy: Tensor) -> Tensor:
    """One id per row, [B] int64: the largest of `logits` where `is_greedy` [B, 1], else drawn from their softmax.

    `noise` is Gumbel noise [B, V]. Of equal values the first wins.
    """
    return (logits + noise.masked_fill(is_greedy, 0.0)).argmax(dim=-1)


def draw_reference(  # noqa: PLR0917 (each is a column of its own)
    logits: Tensor, noise: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, is_greedy: Tensor
) -> Tensor:
    """One id per row of `logits` [B, V], [B] int64: `keep_top_k`, `keep_top_p` and `pick` of logits / temperature.

    Computed in float32. `noise` [B, V] float32; the rest [B, 1], `top_k` int64 and `is_greedy` bool. -inf is never
    drawn unless nothing else is left.
    """
    logits = logits.float() / temperature
    # Filters cost a sort each. On a CPU their parameters can be looked at.
    limit = int(top_k.max()) if logits.is_cpu else logits.shape[-1]
    if limit:
        logits = keep_top_k(logits, top_k, limit)
    if not logits.is_cpu or bool((top_p < 1).any()):
        logits = keep_top_p(logits, top_p)
    return pick(logits, noise, is_greedy)


def mask_logits_reference(logits: Tensor, seen: Tensor, penalty: Tensor, banned: Tensor) -> Tensor:
    """`penalize_seen` of `logits` [B, V] in float32, then `banned` [B, V] or [V] bool at -inf."""
    return penalize_seen(logits.float(), seen, penalty).masked_fill(banned, -torch.inf)


if triton is not None:

    @triton.jit
    def _log(x):
        """The natural logarithm of normal float32 `x` > 0, to three units in the last place; tl.log is off by 2e-7."""
        bits = x.to(tl.int32, bitcast=True)
        # x = 2**exponent * mantissa, mantissa in [sqrt(1/2), sqrt(2)); log(mantissa) = 2 atanh(s), |s| < .1716.
        exponent = (bits - 0x3F3504F3) >> 23
        mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
        s = tl.div_rn(mantissa - 1, mantissa + 1)
        square = s * s
        # Terms up to s**9: the next is 4e-9 of the whole.
        series = square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9))))
        return exponent.to(tl.float32) * 0.6931471805599453 + 2 * (s + s * series)

    @triton.jit
    def _gumbel_noise(  # noqa: PLR0917 (a kernel's arguments are positional)
        seed,
        segment,
        frame,
        out,
        seed_stride,
        segment_stride,
        frame_stride,
        codebooks,
        vocabulary,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        codebook, row = tl.program_id(1), tl.program_id(2)
        group = tl.program_id(0) * block + tl.arange(0, block)
        numbers = tl.zeros([block], tl.int32)
        a, b, c, d = tl.philox(
            tl.load(seed + row * seed_stride),
            group,
            numbers + codebook,
            numbers + tl.load(frame + row * frame_stride).to(tl.int32),
            numbers + tl.load(segment + row * segment_stride).to(tl.int32),
        )
        word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        uniform = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
        v = tl.program_id(0) * block * 4 + tl.arange(0, block * 4)
        line = (row.to(tl.int64) * codebooks + codebook) * vocabulary
        tl.store(out + line + v, -_log(-_log(uniform)), mask=v < vocabulary)

    @triton.jit
    def _kth_largest(x, k):
        """A number that exactly the `k` largest of `x` reach, and those that equal the `k`-th; -inf if too few."""
        bits = x.to(tl.int32, bitcast=True)
        # Integers in the order of the floats.
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        low, high = tl.min(order), tl.max(order)
        # `low` is reached by at least k, `high` + 1 by fewer.
        while low < high:
            middle = (low + high + 1) >> 1
            count = tl.sum((order >= middle).to(tl.int32))
            low = tl.where(count >= k, middle, low)
            high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
        found = low.to(tl.int32)
        return tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)

    @triton.jit
    def _draw(  # noqa: PLR0917
        logits,
        noise,
        temperature,
        top_k,
        top_p,
        is_greedy,
        out,
        logits_stride,
        noise_stride,
        temperature_stride,
        top_k_stride,
        top_p_stride,
        greedy_stride,
        vocabulary,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        row = tl.program_id(0).to(tl.int64)
        v = tl.arange(0, block)
        heat = tl.load(temperature + row * temperature_stride)
        k = tl.load(top_k + row * top_k_stride)
        p = tl.load(top_p + row * top_p_stride)
        greedy = tl.load(is_greedy + row * greedy_stride)
        given = tl.load(logits + row * logits_stride + v, mask=v < vocabulary, other=-float("inf")).to(tl.float32)
        scaled = tl.div_rn(given, tl.zeros([block], tl.float32) + heat)
        noisy = scaled
        if not greedy:
            noisy += tl.load(noise + row * noise_stride + v, mask=v < vocabulary, other=0.0)
        weight, room, largest = tl.zeros([block], tl.float32), 0.0, 0.0
        if (p < 1) & (not greedy):
            largest = tl.max(scaled)
            weight = tl.exp(scaled - largest)
            if (k > 0) & (k < vocabulary):
                weight = tl.where(scaled >= _kth_largest(scaled, k), weight, 0.0)
            room = (1 - p) * tl.sum(weight)
        best, choice = tl.max(noisy, axis=0, return_indices=True)
        is_settled = greedy | ((k <= 0) & (p >= 1))
        # Top-k and top-p keep what is large: if the choice is not among it, nothing smaller is. So it goes with all
        # that, and the next best is tried. Each turn drops at least one; logits that are not numbers end it too.
        while not is_settled:
            value = tl.div_rn(tl.load(logits + row * logits_stride + choice).to(tl.float32), heat)
            larger = scaled > value
            is_settled = (k <= 0) | (tl.sum(larger.to(tl.int32)) < k)
            if p < 1:
                is_settled &= (value == largest) | (tl.sum(tl.where(larger, 0.0, weight)) > room)
            is_settled |= best == -float("inf")
            if not is_settled:
                noisy = tl.where(larger, noisy, -float("inf"))
                best, choice = tl.max(noisy, axis=0, return_indices=True)
        tl.store(out + row, tl.minimum(choice, vocabulary - 1).to(tl.int64))

    @triton.jit
    def _mask_logits(  # noqa: PLR0917
        logits,
        seen,
        penalty,
        banned,
        out,
        logits_stride,
        seen_stride,
        penalty_stride,
        banned_stride,
        vocabulary,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        row = tl.program_id(1).to(tl.int64)
        v = tl.program_id(0) * block + tl.arange(0, block)
        is_there = v < vocabulary
        value = tl.load(logits + row * logits_stride + v, mask=is_there, other=0.0).to(tl.float32)
        factor = tl.zeros([block], tl.float32) + tl.load(penalty + row * penalty_stride)
        is_seen = tl.load(seen + row * seen_stride + v, mask=is_there, other=0) != 0
        is_banned = tl.load(banned + row * banned_stride + v, mask=is_there, other=0) != 0
        value = tl.where(is_seen, tl.where(value < 0, value * factor, tl.div_rn(value, factor)), value)
        tl.store(out + row * vocabulary + v, tl.where(is_banned, -float("inf"), value), mask=is_there)


def gumbel_noise_kernel(seed: Tensor, segment: Tensor, frame: Tensor, codebooks: int, vocabulary: int) -> Tensor:
    """`gumbel_noise_reference` as one Triton kernel: the same words; logarithms differ in their last bits."""
    out = torch.empty((seed.shape[0], codebooks, vocabulary), dtype=torch.float32, device=seed.device)
    overlap, block = can_overlap(seed.device), 256
    _gumbel_noise[triton.cdiv(vocabulary, 4 * block), codebooks, seed.shape[0]](
        seed,
        segment,
        frame,
        out,
        seed.stride(0),
        segment.stride(0),
        frame.stride(0),
        codebooks,
        vocabulary,
        block,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


def draw_kernel(  # noqa: PLR0917
    logits: Tensor, noise: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, is_greedy: Tensor
) -> Tensor:
    """`draw_reference` as one Triton kernel, a program per row; ids differ only where top-p's sums round otherwise."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    overlap = can_overlap(logits.device)
    given = (logits, noise, temperature, top_k, top_p, is_greedy)
    strides = [tensor.stride(0) for tensor in given]
    block = triton.next_power_of_2(vocabulary)
    # H200, V 2048, top-k 50 of flat logits: 3.0 us at B 1 and 5.8 at 64 with 8 warps; at 256 7.0 with 4.
    warps = 8 if rows <= 128 else 4
    _draw[(rows,)](*given, out, *strides, vocabulary, block, overlap, num_warps=warps, launch_pdl=overlap)
    return out


def mask_logits_kernel(logits: Tensor, seen: Tensor, penalty: Tensor, banned: Tensor) -> Tensor:
    """`mask_logits_reference` as one Triton kernel."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    overlap, block = can_overlap(logits.device), 1024
    given = (logits, seen, penalty, banned.expand(rows, vocabulary))
    strides = [tensor.stride(0) for tensor in given]
    _mask_logits[triton.cdiv(vocabulary, block), rows](
        *given, out, *strides, vocabulary, block, overlap, num_warps=4, launch_pdl=overlap
    )
    return out


_LARGEST_VOCABULARY = 4096


def _can_draw(logits: Tensor, noise: Tensor, *_: Tensor) -> bool:
    return (
        logits.numel() > 0
        and logits.shape[1] <= _LARGEST_VOCABULARY
        and logits.stride(1) == noise.stride(1) == 1
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _can_mask(logits: Tensor, seen: Tensor, penalty: Tensor, banned: Tensor) -> bool:
    return (
        logits.numel() > 0
        and logits.stride(1) == seen.stride(1) == banned.stride(-1) == 1
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


gumbel_noise = Operation(
    "gumbel_noise",
    gumbel_noise_kernel,
    gumbel_noise_reference,
    lambda seed, segment, frame, codebooks, vocabulary: seed.numel() * codebooks * vocabulary > 0,
)
draw = Operation("draw", draw_kernel, draw_reference, _can_draw)
mask_logits = Operation("mask_logits", mask_logits_kernel, mask_logits_reference, _can_mask)
