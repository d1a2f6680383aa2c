"""Bidirectional attention within many short sequences, without KV cache: a Triton kernel beside its torch reference.

A program computes one or a few query heads of one sequence, held in registers."""

import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.attention import Rotary, exp2_scale, is_power_of_two
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import is_row_major, pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

_MAX_TOKENS = 32


def bidirectional_attention_reference(qkv: Tensor, rotary: Rotary, kv_heads: int, kept: slice) -> Tensor:
    """Attend within each of N sequences of T tokens, `qkv` [N * T, (heads + 2 kv heads) * D]: [N * K, heads * D].
    `rotary`: cos and signed sin of the T positions, [T, 1, D] each. Only the K tokens of `kept` are queries.
    Capturable; no sync."""
    cos, signed_sin = rotary
    tokens, _, width = cos.shape
    heads = qkv.unflatten(-1, (-1, width)).unflatten(0, (-1, tokens))
    given, values = heads[:, :, :-kv_heads], heads[:, :, -kv_heads:]
    rotated = (given * cos).addcmul(given.roll(width // 2, -1), signed_sin)
    queries, keys = rotated[:, kept, :-kv_heads], rotated[:, :, -kv_heads:]
    query, key, value = (rows.transpose(1, 2) for rows in (queries, keys, values))
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


if triton is not None:

    @triton.jit
    def _rotate(value, partner, cos, sin):
        """Rotary embedding of `value`, rounded as in the reference; `partner` is its rotated half."""
        dtype: tl.constexpr = value.dtype
        rotated = (value.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
        return (rotated + partner.to(tl.float32) * sin.to(tl.float32)).to(dtype)

    @triton.jit
    def _attend(
        qkv, cos, sin, out, qkv_stride, scale,
        NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_TOKENS: tl.constexpr,
        FIRST: tl.constexpr, NUM_KEPT: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
        IS_INTERPRETED: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # `HEADS` query heads that share a kv head: their rows stand one below the other, `BLOCK` each.
        pdl_launch_dependents(ENABLE_PDL)
        # Triton's interpreter reads bfloat16 operands of tl.dot as integers; float32 gives the same products.
        operand: tl.constexpr = tl.float32 if IS_INTERPRETED else out.dtype.element_ty
        sequence, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
        token, column = tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
        row, is_token = token[:, None], (token < NUM_TOKENS)[:, None]
        line = tl.arange(0, HEADS * BLOCK)[:, None]
        query_row, head = line % BLOCK, first_head + line // BLOCK
        is_query = query_row < NUM_TOKENS
        at, query_at = row * HEAD_DIM + column[None, :], query_row * HEAD_DIM + column[None, :]
        cos_tile, sin_tile = tl.load(cos + at, mask=is_token, other=0.0), tl.load(sin + at, mask=is_token, other=0.0)
        query_cos = tl.load(cos + query_at, mask=is_query, other=0.0)
        query_sin = tl.load(sin + query_at, mask=is_query, other=0.0)
        pdl_wait(ENABLE_PDL)
        qkv += sequence * NUM_TOKENS * qkv_stride
        own, other = column[None, :], ((column + HEAD_DIM // 2) % HEAD_DIM)[None, :]
        key_row = qkv + row * qkv_stride + (NUM_HEADS + first_head // GROUP_SIZE) * HEAD_DIM
        query_start = qkv + query_row * qkv_stride + head * HEAD_DIM
        query = tl.load(query_start + own, mask=is_query, other=0.0)
        query_partner = tl.load(query_start + other, mask=is_query, other=0.0)
        key = tl.load(key_row + own, mask=is_token, other=0.0)
        key_partner = tl.load(key_row + other, mask=is_token, other=0.0)
        value = tl.load(key_row + NUM_HEADS // GROUP_SIZE * HEAD_DIM + own, mask=is_token, other=0.0)
        query, key = _rotate(query, query_partner, query_cos, query_sin), _rotate(key, key_partner, cos_tile, sin_tile)
        score = tl.dot(query.to(operand), tl.trans(key.to(operand)), input_precision="ieee") * scale
        score = tl.where((token < NUM_TOKENS)[None, :], score, -float("inf"))
        p = tl.exp2(score - tl.max(score, axis=1)[:, None])
        l_i = tl.sum(p, axis=1)
        acc = tl.dot(p.to(operand), value.to(operand), input_precision="ieee") / l_i[:, None]
        is_kept = (query_row >= FIRST) & (query_row < FIRST + NUM_KEPT)
        target = out + ((sequence * NUM_KEPT + query_row - FIRST) * NUM_HEADS + head) * HEAD_DIM + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=is_kept)


def bidirectional_attention_kernel(
    qkv: Tensor,
    rotary: Rotary,
    kv_heads: int,
    kept: slice,
    *,
    warps: int = 0,
    heads_at_once: int = 0,
    enable_pdl: bool = True,
) -> Tensor:
    """`bidirectional_attention_reference` as one Triton kernel, a program per sequence and `heads_at_once` query heads
    of a kv head; no gradient. For either and for `warps` per program, 0 chooses the fastest."""
    cos, signed_sin = rotary
    tokens, _, width = cos.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    first, end, _ = kept.indices(tokens)
    sequences = qkv.shape[0] // tokens
    out = qkv.new_empty(sequences * (end - first), heads * width)
    # On an H100, groups of 8 heads of 11 tokens, us with one head and one warp, one and two, four and four: 2 sequences
    # 2.9, 2.5, 2.7; 32: 4.6, 3.9, 4.1; 64: 5.4, -, 5.1; 128: 10.4, -, 7.9; 256: 20.2, -, 13.6.
    group = heads // kv_heads
    heads_at_once = heads_at_once or (4 if sequences >= 64 and group % 4 == 0 else 1)
    warps = warps or (4 if heads_at_once == 4 else 2 if sequences <= 32 else 1)
    _attend[sequences, heads // heads_at_once](
        qkv=qkv, cos=cos, sin=signed_sin, out=out, qkv_stride=qkv.stride(0), scale=exp2_scale(width),
        NUM_HEADS=heads, GROUP_SIZE=group, HEAD_DIM=width, NUM_TOKENS=tokens, FIRST=first,
        NUM_KEPT=end - first, BLOCK=max(16, triton.next_power_of_2(tokens)), HEADS=heads_at_once,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=warps, **pdl_options(qkv.device, enable_pdl=enable_pdl),
    )  # fmt: skip
    return out


def _can_attend(qkv: Tensor, rotary: Rotary, kv_heads: int, kept: slice) -> bool:
    tokens, _, width = rotary[0].shape
    return (
        is_row_major(qkv, *rotary)
        and all(table.is_contiguous() for table in rotary)
        and tokens <= _MAX_TOKENS
        and is_power_of_two(width, 16, 128)
        and kept.indices(tokens)[2] == 1
    )


bidirectional_attention = Operation(bidirectional_attention_kernel, bidirectional_attention_reference, _can_attend)
