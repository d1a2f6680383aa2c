"""The Triton kernels of `sonoro.ops.sample`, which launches them. Requires Triton."""

import triton
import triton.language as tl

from sonoro.ops.norm import pdl_launch_dependents, pdl_wait


@triton.jit
def _log(x):
    """Natural logarithm of normal float32 `x` > 0, accurate to 3 ulp; tl.log is off by 2e-7."""
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
def _philox(seed, segment, frame, seed_stride, segment_stride, frame_stride, row, codebook, BLOCK: tl.constexpr):
    """Four Philox words for each of this program's `BLOCK` counters."""
    numbers = tl.zeros([BLOCK], tl.int32)
    return tl.philox(
        tl.load(seed + row * seed_stride),
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        numbers + codebook,
        numbers + tl.load(frame + row * frame_stride).to(tl.int32),
        numbers + tl.load(segment + row * segment_stride).to(tl.int32),
    )


@triton.jit
def make_gumbel_noise(
    seed, segment, frame, out, seed_stride, segment_stride, frame_stride, codebooks, vocabulary,
    BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(ENABLE_PDL)
    pdl_wait(ENABLE_PDL)
    codebook, row = tl.program_id(1), tl.program_id(2)
    a, b, c, d = _philox(seed, segment, frame, seed_stride, segment_stride, frame_stride, row, codebook, BLOCK)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    v = tl.program_id(0) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    line = (row.to(tl.int64) * codebooks + codebook) * vocabulary
    tl.store(out + line + v, -_log(-_log(uniform)), mask=v < vocabulary)


@triton.jit
def _normal_pair(distance, angle):
    """Box-Muller: two normal numbers from two random words."""
    near = ((distance >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    radians = ((angle >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23)) * 6.283185307179586
    far = tl.sqrt_rn(-2 * _log(near))
    return far * tl.cos(radians), far * tl.sin(radians)


@triton.jit
def make_normal_noise(
    seed, segment, frame, out, seed_stride, segment_stride, frame_stride, count,
    BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(ENABLE_PDL)
    pdl_wait(ENABLE_PDL)
    row = tl.program_id(1)
    a, b, c, d = _philox(seed, segment, frame, seed_stride, segment_stride, frame_stride, row, 0, BLOCK)
    first, second = _normal_pair(a, b)
    third, fourth = _normal_pair(c, d)
    place = tl.program_id(0) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    made = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    tl.store(out + row.to(tl.int64) * count + place, made, mask=place < count)


@triton.jit
def _kth_largest(x, k):
    """A threshold that exactly the `k` largest of `x`, with ties, reach: by bisection on the floats' bits. -inf if
    there are fewer."""
    bits = x.to(tl.int32, bitcast=True)
    # Integers in the same order as the floats.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    low, high = tl.min(order), tl.max(order)
    # Invariant: at least k values reach `low`, fewer than k reach `high` + 1.
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.sum((order >= middle).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    found = low.to(tl.int32)
    return tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)


@triton.jit
def sample(
    logits, noise, temperature, top_k, top_p, is_greedy, out, logits_stride, noise_stride, temperature_stride,
    top_k_stride, top_p_stride, greedy_stride, out_stride, table, embedded, table_stride, table_size, vocabulary,
    EMBED_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(ENABLE_PDL)
    pdl_wait(ENABLE_PDL)
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    temp = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    greedy = tl.load(is_greedy + row * greedy_stride)
    raw = tl.load(logits + row * logits_stride + v, mask=v < vocabulary, other=-float("inf")).to(tl.float32)
    scaled = tl.div_rn(raw, tl.zeros([BLOCK_V], tl.float32) + temp)
    noisy = scaled
    if not greedy:
        noisy += tl.load(noise + row * noise_stride + v, mask=v < vocabulary, other=0.0)
    weight, top_p_slack, max_logit = tl.zeros([BLOCK_V], tl.float32), 0.0, 0.0
    if (p < 1) & (not greedy):
        max_logit = tl.max(scaled)
        weight = tl.exp(scaled - max_logit)
        if (k > 0) & (k < vocabulary):
            weight = tl.where(scaled >= _kth_largest(scaled, k), weight, 0.0)
        top_p_slack = (1 - p) * tl.sum(weight)
    best, choice = tl.max(noisy, axis=0, return_indices=True)
    is_accepted = greedy | ((k <= 0) & (p >= 1))
    # Top-k and top-p keep the largest logits: if the choice is not kept, drop it and all that is not larger, and try
    # the next best. Each iteration drops at least one; NaN logits end it too.
    while not is_accepted:
        # Among NaN logits the choice may be one of the padding.
        choice = tl.minimum(choice, vocabulary - 1)
        value = tl.div_rn(tl.load(logits + row * logits_stride + choice).to(tl.float32), temp)
        larger = scaled > value
        is_accepted = (k <= 0) | (tl.sum(larger.to(tl.int32)) < k)
        if p < 1:
            is_accepted &= (value == max_logit) | (tl.sum(tl.where(larger, 0.0, weight)) > top_p_slack)
        is_accepted |= best == -float("inf")
        if not is_accepted:
            noisy = tl.where(larger, noisy, -float("inf"))
            best, choice = tl.max(noisy, axis=0, return_indices=True)
    choice = tl.minimum(choice, vocabulary - 1).to(tl.int64)
    tl.store(out + row * out_stride, choice)
    if EMBED_DIM:
        column = tl.arange(0, BLOCK_D)
        line = tl.where(choice < table_size, choice, 0) * table_stride
        value = tl.load(table + line + column, mask=column < EMBED_DIM)
        tl.store(embedded + row * EMBED_DIM + column, value, mask=column < EMBED_DIM)


@triton.jit
def mask_logits(
    logits, seen, penalty, banned, out, logits_stride, seen_stride, penalty_stride, banned_stride, vocabulary,
    BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(ENABLE_PDL)
    pdl_wait(ENABLE_PDL)
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = v < vocabulary
    value = tl.load(logits + row * logits_stride + v, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.zeros([BLOCK], tl.float32) + tl.load(penalty + row * penalty_stride)
    is_seen = tl.load(seen + row * seen_stride + v, mask=is_there, other=0) != 0
    is_banned = tl.load(banned + row * banned_stride + v, mask=is_there, other=0) != 0
    value = tl.where(is_seen, tl.where(value < 0, value * factor, tl.div_rn(value, factor)), value)
    tl.store(out + row * vocabulary + v, tl.where(is_banned, -float("inf"), value), mask=is_there)
