"""Sampling with addressed random numbers: Gumbel and normal noise from Philox counters, top-k, top-p, temperature.

Triton kernels beside torch references. Every parameter is per request and on the device, so a batch may mix greedy and
sampled requests. Capturable; no sync."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import triton

if triton is not None:
    from sonoro.ops import sample_kernels

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_words(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words, int64 in [0, 2**32), for each counter.
    `counter` (four) and `key` (two) are int64 tensors of which the low 32 bits are used; they broadcast against one
    another, so parts that vary along one axis need not be expanded.
    Follows Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    a, b, c, d = (word & _WORD for word in counter)
    left, right = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap in int64, which keeps their bits. `b`, `d` and the keys have garbage above bit 31:
        # they are only xored, and masked after that.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = ((second >> 32) ^ (b ^ left)) & _WORD
        c = ((first >> 32) ^ (d ^ right)) & _WORD
        b, d = second, first
        left, right = left + _KEY_STEPS[0], right + _KEY_STEPS[1]
    return a, b & _WORD, c, d & _WORD


def gumbel_noise_reference(seed: Tensor, segment: Tensor, frame: Tensor, codebooks: int, vocabulary: int) -> Tensor:
    """Gumbel noise [B, codebooks, vocabulary] float32 of one frame, addressed by `seed`, `segment`, `frame` [B] int64.
    Entry (b, codebook, v) depends on these three numbers of request b, codebook and v alone: key = seed (low word, high
    word), counter = (v // 4, codebook, frame, segment), word v % 4, u = ((word >> 9) + 0.5) / 2**23, -log(-log(u))."""
    uniform = _uniforms(seed, segment, frame, codebooks, vocabulary)
    return uniform.log_().neg_().log_().neg_()


def normal_noise_reference(seed: Tensor, segment: Tensor, frame: Tensor, count: int) -> Tensor:
    """Normal noise [B, count] float32 of one frame, addressed by `seed`, `segment`, `frame` [B] int64.
    Entries 2 i and 2 i + 1 are r cos(a) and r sin(a) with r = sqrt(-2 ln u') and a = 2 pi u, where u' and u are
    uniforms 2 i and 2 i + 1 of codebook 0 as in `gumbel_noise_reference`. No value exceeds 5.8. Capturable; no sync.
    Follows Box and Muller, "A note on the generation of random normal deviates" (1958)."""
    pairs = _uniforms(seed, segment, frame, 1, count + count % 2)[:, 0].unflatten(1, (-1, 2))
    distance, angle = pairs[..., 0].log().mul_(-2).sqrt_(), pairs[..., 1] * (2 * math.pi)
    return torch.stack((distance * angle.cos(), distance * angle.sin()), dim=-1).flatten(1)[:, :count]


def _uniforms(seed: Tensor, segment: Tensor, frame: Tensor, codebooks: int, count: int) -> Tensor:
    """Uniforms in (0, 1), [B, codebooks, count] float32, addressed as in `gumbel_noise_reference`."""
    row_seed, row_segment, row_frame = (rows[:, None, None] for rows in (seed, segment, frame))
    book = torch.arange(codebooks, device=seed.device)[:, None]
    block = torch.arange(-(-count // 4), device=seed.device)
    words = philox_words((block, book, row_frame, row_segment), (row_seed, row_seed >> 32))
    word = torch.stack(words, dim=-1).flatten(-2)[..., :count]
    return (word >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def penalize_seen(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty: `logits` [B, V] of ids in `seen` [B, V] bool are divided by `penalty` [B, 1] if positive,
    multiplied if negative (1 is off)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, top_k: Tensor, limit: int) -> Tensor:
    """Set `logits` [B, V] below the row's `top_k`-th largest to -inf; ties with it stay. `top_k` [B, 1] int64; 0 is
    off.
    `limit` must be at least every `top_k` below V: a host value, so that there is no sync."""
    best = logits.topk(min(limit, logits.shape[-1]), dim=-1).values
    smallest = best.gather(-1, (top_k - 1).clamp(0, best.shape[-1] - 1))
    return logits.masked_fill((logits < smallest) & (top_k > 0), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Set the least likely `logits` [B, V] to -inf, with a total probability of at most 1 - `top_p` [B, 1].
    Equal values stay or go together, and the largest stay. A `top_p` of 1 keeps every id of nonzero probability. Costs
    a sort."""
    ascending = logits.sort(dim=-1).values
    dropped = (ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p).sum(dim=-1, keepdim=True)
    smallest = ascending.gather(-1, dropped.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill(logits < smallest, -torch.inf)


def gumbel_argmax(logits: Tensor, noise: Tensor, is_greedy: Tensor) -> Tensor:
    """One id per row of `logits` [B, V], [B] int64: the argmax where `is_greedy` [B, 1], else sampled from the softmax
    with Gumbel `noise` [B, V]. Ties go to the lowest id."""
    return (logits + noise.masked_fill(is_greedy, 0.0)).argmax(dim=-1)


class Sampling(NamedTuple):
    """Sampling parameters by request, [B, 1] each; `top_k` is int64. A `top_k` of 0 and a `top_p` of 1 are off."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    is_greedy: Tensor

    @property
    def launch_arguments(self) -> dict[str, Any]:
        """The arguments of a sampling kernel for these tensors and their strides."""
        return {
            **self._asdict(),
            "temperature_stride": self.temperature.stride(0),
            "top_k_stride": self.top_k.stride(0),
            "top_p_stride": self.top_p.stride(0),
            "greedy_stride": self.is_greedy.stride(0),
        }


def sample_reference(logits: Tensor, noise: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """Sample one id per row of `logits` [B, V], [B] int64: top-k, top-p and `gumbel_argmax` of logits / temperature.
    Computed in float32; `noise` [B, V] float32. An id at -inf is sampled only if all are. Writes to `ids` [B], of any
    stride, if given."""
    temperature, top_k, top_p, is_greedy = sampling
    logits = logits.float() / temperature
    # Each filter costs a sort; on a CPU it is skipped if its parameters are off.
    limit = int(top_k.max()) if logits.is_cpu else logits.shape[-1]
    if limit:
        logits = keep_top_k(logits, top_k, limit)
    if not logits.is_cpu or bool((top_p < 1).any()):
        logits = keep_top_p(logits, top_p)
    chosen = gumbel_argmax(logits, noise, is_greedy)
    return chosen if ids is None else ids.copy_(chosen)


def sample_and_embed_reference(logits: Tensor, noise: Tensor, sampling: Sampling, table: Tensor, ids: Tensor) -> Tensor:
    """`sample_reference` into `ids` [B] int64; returns their rows [B, W] of `table` [T, W], row 0 for ids from T on."""
    sample_reference(logits, noise, sampling, ids)
    return F.embedding(ids.masked_fill(ids >= table.shape[0], 0), table)


def mask_logits_reference(logits: Tensor, seen: Tensor, penalty: Tensor, banned: Tensor) -> Tensor:
    """`penalize_seen` of `logits` [B, V] in float32, then -inf for `banned` [B, V] or [V] bool."""
    return penalize_seen(logits.float(), seen, penalty).masked_fill(banned, -torch.inf)


def gumbel_noise_kernel(seed: Tensor, segment: Tensor, frame: Tensor, codebooks: int, vocabulary: int) -> Tensor:
    """`gumbel_noise_reference` as one Triton kernel: the same random words; logarithms differ in their last bits."""
    out = torch.empty((seed.shape[0], codebooks, vocabulary), dtype=torch.float32, device=seed.device)
    block = 256
    sample_kernels.make_gumbel_noise[triton.cdiv(vocabulary, 4 * block), codebooks, seed.shape[0]](
        seed=seed, segment=segment, frame=frame, out=out, seed_stride=seed.stride(0),
        segment_stride=segment.stride(0), frame_stride=frame.stride(0), codebooks=codebooks, vocabulary=vocabulary,
        BLOCK=block, num_warps=4, **pdl_options(seed.device),
    )  # fmt: skip
    return out


def normal_noise_kernel(seed: Tensor, segment: Tensor, frame: Tensor, count: int) -> Tensor:
    """`normal_noise_reference` as one Triton kernel: the same random words; results differ in their last bits."""
    out = torch.empty((seed.shape[0], count), dtype=torch.float32, device=seed.device)
    block = 64
    sample_kernels.make_normal_noise[triton.cdiv(count, 4 * block), seed.shape[0]](
        seed=seed, segment=segment, frame=frame, out=out, seed_stride=seed.stride(0),
        segment_stride=segment.stride(0), frame_stride=frame.stride(0), count=count,
        BLOCK=block, num_warps=2, **pdl_options(seed.device),
    )  # fmt: skip
    return out


def sample_kernel(logits: Tensor, noise: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """`sample_reference` as one Triton kernel, a program per request; ids differ only where top-p's sums round
    differently."""
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if ids is None else ids
    _launch_sample(logits, noise, sampling, ids, None)
    return ids


def sample_and_embed_kernel(logits: Tensor, noise: Tensor, sampling: Sampling, table: Tensor, ids: Tensor) -> Tensor:
    """`sample_and_embed_reference` with the kernel and the ids of `sample_kernel`; `table` may have any dtype."""
    return _launch_sample(logits, noise, sampling, ids, table)


def _launch_sample(logits: Tensor, noise: Tensor, sampling: Sampling, ids: Tensor, table: Tensor | None) -> Tensor:
    rows, vocabulary = logits.shape
    width = 0 if table is None else table.shape[1]
    # Without a table these pointers are not used.
    table = ids[:, None] if table is None else table
    embedded = torch.empty((rows, width), dtype=table.dtype, device=logits.device) if width else ids
    sample_kernels.sample[(rows,)](
        logits=logits, noise=noise, **sampling.launch_arguments, out=ids, logits_stride=logits.stride(0),
        noise_stride=noise.stride(0), out_stride=ids.stride(0), table=table, embedded=embedded,
        table_stride=table.stride(0), table_size=table.shape[0], vocabulary=vocabulary, EMBED_DIM=width,
        BLOCK_V=triton.next_power_of_2(vocabulary), BLOCK_D=triton.next_power_of_2(max(width, 1)),
        # H200, V 2048, top-k 50 of flat logits: 3.0 us at B 1 and 5.8 at 64 with 8 warps; at 256 7.0 with 4.
        num_warps=8 if rows <= 128 else 4, **pdl_options(logits.device),
    )  # fmt: skip
    return embedded


def mask_logits_kernel(logits: Tensor, seen: Tensor, penalty: Tensor, banned: Tensor) -> Tensor:
    """`mask_logits_reference` as one Triton kernel."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    block = 1024
    banned = banned.expand(rows, vocabulary)
    sample_kernels.mask_logits[triton.cdiv(vocabulary, block), rows](
        logits=logits, seen=seen, penalty=penalty, banned=banned, out=out, logits_stride=logits.stride(0),
        seen_stride=seen.stride(0), penalty_stride=penalty.stride(0), banned_stride=banned.stride(0),
        vocabulary=vocabulary, BLOCK=block, num_warps=4, **pdl_options(logits.device),
    )  # fmt: skip
    return out


_LARGEST_VOCABULARY = 4096


def _can_sample(logits: Tensor, noise: Tensor, sampling: Sampling, ids: Tensor | None = None) -> bool:
    return (
        logits.numel() > 0
        and logits.shape[1] <= _LARGEST_VOCABULARY
        and logits.stride(1) == noise.stride(1) == 1
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _can_sample_and_embed(logits: Tensor, noise: Tensor, sampling: Sampling, table: Tensor, ids: Tensor) -> bool:
    is_table = 0 < table.shape[1] <= 8192 and table.shape[0] > 0 and table.stride(1) == 1
    return _can_sample(logits, noise, sampling) and is_table


def _can_mask(logits: Tensor, seen: Tensor, penalty: Tensor, banned: Tensor) -> bool:
    return (
        logits.numel() > 0
        and logits.stride(1) == seen.stride(1) == banned.stride(-1) == 1
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


gumbel_noise = Operation(
    gumbel_noise_kernel,
    gumbel_noise_reference,
    lambda seed, segment, frame, codebooks, vocabulary: seed.numel() * codebooks * vocabulary > 0,
)
normal_noise = Operation(
    normal_noise_kernel, normal_noise_reference, lambda seed, segment, frame, count: seed.numel() * count > 0
)
sample = Operation(sample_kernel, sample_reference, _can_sample)
sample_and_embed = Operation(sample_and_embed_kernel, sample_and_embed_reference, _can_sample_and_embed)
mask_logits = Operation(mask_logits_kernel, mask_logits_reference, _can_mask)
