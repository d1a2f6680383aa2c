"""The Triton kernels of `sonoro.ops.attention` and `sonoro.ops.varlen`, which launch them. Requires Triton.

A program of `decode` computes one request, kv head and KV split. Its threads form lanes, one position each: the threads
of a lane read 16 bytes each, and every lane keeps its own running max and sum until the end."""

# Tuples grow during compilation, which type checkers cannot follow.
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl

from sonoro.ops.norm import pdl_launch_dependents, pdl_wait, scale_and_weigh


@triton.jit
def _norm_and_rotate(
    value, partner, weight, partner_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, IS_NORMED: tl.constexpr
):
    """RMS norm and rotary embedding of `value` [HEAD_DIM], rounded as the reference; `partner` is its rotated half."""
    dtype: tl.constexpr = value.dtype
    normed = value.to(tl.float32)
    if IS_NORMED:
        inverse = tl.rsqrt(tl.sum(normed * normed, axis=0) * (1.0 / HEAD_DIM) + eps)
        normed = scale_and_weigh(normed, inverse, weight, dtype).to(tl.float32)
        other = scale_and_weigh(partner.to(tl.float32), inverse, partner_weight, dtype).to(tl.float32)
    else:
        other = partner.to(tl.float32)
    rotated = (normed * cos.to(tl.float32)).to(dtype).to(tl.float32)
    return (rotated + other * sin.to(tl.float32)).to(dtype)


@triton.jit
def _load_norm(weights, flat, partner, IS_NORMED: tl.constexpr):
    """The weights of a norm, and the same with both halves swapped."""
    weight, partner_weight = 1.0, 1.0
    if IS_NORMED:
        weight, partner_weight = tl.load(weights + flat), tl.load(weights + partner)
    return weight, partner_weight


@triton.jit
def _load_heads(given, flat, partner, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Query heads, and the same with both halves swapped."""
    heads, partners = (), ()
    for member in tl.static_range(GROUP_SIZE):
        heads += (tl.load(given + member * HEAD_DIM + flat),)
        partners += (tl.load(given + member * HEAD_DIM + partner),)
    return heads, partners


@triton.jit
def _load_kv_tiles(
    keys, values, page_numbers, lane, offset, start, end,
    PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Load keys and values of positions from `start` on, `TILES` tiles of [LANES, D] each; zeros from `end` on."""
    numbers, key, value = (), (), ()
    # A tile lies within one page: `LANES` divides the page and the start.
    for tile in tl.static_range(TILES):
        at = start + tile * LANES
        numbers += (tl.load(page_numbers + at // PAGE_SIZE, mask=at < end, other=0).to(tl.int64),)
    for tile in tl.static_range(TILES):
        at = start + tile * LANES
        base = numbers[tile] * PAGE_STRIDE + (at % PAGE_SIZE) * (PAGE_STRIDE // PAGE_SIZE)
        is_live = at + lane < end
        key += (tl.load(keys + base + offset, mask=is_live, other=0.0),)
        value += (tl.load(values + base + offset, mask=is_live, other=0.0),)
    return key, value


@triton.jit
def _attend_kv_tiles(key, value, start, end, lane, queries, m_i, l_i, acc, LANES: tl.constexpr):
    """Update the running max, sum and output of every query head and lane, [LANES, 1 or D] each, with these tiles."""
    new_m, new_l, new_acc = (), (), ()
    for member in tl.static_range(len(queries)):
        scores, m_new = (), m_i[member]
        for tile in tl.static_range(len(key)):
            score = tl.sum(queries[member] * key[tile].to(tl.float32), axis=1, keep_dims=True)
            scores += (tl.where(start + tile * LANES + lane < end, score, -float("inf")),)
            m_new = tl.maximum(m_new, scores[tile])
        alpha = tl.exp2(m_i[member] - m_new)
        l_new, acc_new = l_i[member] * alpha, acc[member] * alpha
        for tile in tl.static_range(len(key)):
            p = tl.exp2(scores[tile] - m_new)
            l_new += p
            acc_new += p * value[tile].to(tl.float32)
        new_m += (m_new,)
        new_l += (l_new,)
        new_acc += (acc_new,)
    return new_m, new_l, new_acc


@triton.jit
def _load_earlier_new_tokens(
    fresh, step, cos, sin, eps, k_weight, k_partner_weight, lane, flat, partner, position, new_token, is_new,
    NEW_TOKENS: tl.constexpr, VALUES: tl.constexpr, HEAD_DIM: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    """Keys and values of the new tokens before this one, nearest first; `step` is the stride between new tokens."""
    near_keys, near_values = (), ()
    for back in tl.static_range(1, NEW_TOKENS):
        near, is_there = fresh - back * step, (flat >= 0) & (new_token >= back)
        at = (position - back) * HEAD_DIM + flat
        near_key = _norm_and_rotate(
            tl.load(near + flat, mask=is_there, other=0.0), tl.load(near + partner, mask=is_there, other=0.0),
            k_weight, k_partner_weight,
            tl.load(cos + at, mask=is_there, other=0.0), tl.load(sin + at, mask=is_there, other=0.0),
            eps, HEAD_DIM, IS_NORMED,
        )  # fmt: skip
        near_keys += (near_key,)
        near_values += (
            tl.load(near + VALUES + flat[None, :] + lane * 0, mask=is_new & (new_token >= back), other=0.0),
        )
    return near_keys, near_values


@triton.jit
def _attend_new_tokens(query, new_key, new_value, near_keys, near_values, new_token, is_new):
    """Running max, sum and output of a query head after the new tokens, which all go to the lane of `is_new`."""
    m_n, l_n = tl.sum(query * new_key.to(tl.float32)), 1.0
    v_sum = new_value.to(tl.float32)
    for back in tl.static_range(1, len(near_keys) + 1):
        score = tl.where(new_token >= back, tl.sum(query * near_keys[back - 1].to(tl.float32)), -float("inf"))
        m_new = tl.maximum(m_n, score)
        alpha, p = tl.exp2(m_n - m_new), tl.exp2(score - m_new)
        l_n, v_sum = l_n * alpha + p, v_sum * alpha + p * near_values[back - 1].to(tl.float32)
        m_n = m_new
    return tl.where(is_new, m_n, -1e30), tl.where(is_new, l_n, 0.0), tl.where(is_new, v_sum, 0.0)


@triton.jit
def _begin_heads(
    raw, partners, weight, partner_weight, cos, sin, eps, scale, new_key, new_value, near_keys, near_values,
    new_token, is_new, HEAD_DIM: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    """Scaled queries [1, D], and the initial running max, sum and output of each, by lane."""
    queries, m_i, l_i, acc = (), (), (), ()
    for member in tl.static_range(len(raw)):
        query = _norm_and_rotate(
            raw[member], partners[member], weight, partner_weight, cos, sin, eps, HEAD_DIM, IS_NORMED
        )
        query = query.to(tl.float32) * scale
        queries += (query[None, :],)
        m_n, l_n, v_sum = _attend_new_tokens(query, new_key, new_value, near_keys, near_values, new_token, is_new)
        m_i += (m_n,)
        l_i += (l_n,)
        acc += (v_sum,)
    return queries, m_i, l_i, acc


@triton.jit
def _combine_lanes(m_i, l_i, acc):
    """Combine the lanes' max, sum and output [D] of each query head."""
    m_split, l_split, acc_split = (), (), ()
    for member in tl.static_range(len(m_i)):
        m_n = tl.max(m_i[member], axis=0, keep_dims=True)
        alpha = tl.exp2(m_i[member] - m_n)
        m_split += (tl.sum(m_n),)
        l_split += (tl.sum(l_i[member] * alpha),)
        acc_split += (tl.sum(acc[member] * alpha, axis=0),)
    return m_split, l_split, acc_split


@triton.jit
def _combine_splits(
    partial_acc, partial_ml, line, last, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """Combine splits 0 .. `last` of a query head, rows `line` and every `GROUP_SIZE` after it: [HEAD_DIM]."""
    flat = tl.arange(0, HEAD_DIM)
    m_i, l_i, acc = (), (), ()
    for split in tl.static_range(NUM_SPLITS):
        at, is_live = line + split * GROUP_SIZE, split <= last
        # Bypass L1, which is not coherent with other programs' writes.
        m_i += (tl.load(partial_ml + at * 2, mask=is_live, other=-1e30, cache_modifier=".cg"),)
        l_i += (tl.load(partial_ml + at * 2 + 1, mask=is_live, other=0.0, cache_modifier=".cg"),)
        is_there = (flat >= 0) & is_live
        acc += (tl.load(partial_acc + at * HEAD_DIM + flat, mask=is_there, other=0.0, cache_modifier=".cg"),)
    m_n = m_i[0]
    for split in tl.static_range(1, NUM_SPLITS):
        m_n = tl.maximum(m_n, m_i[split])
    l_n, out = 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        alpha = tl.exp2(m_i[split] - m_n)
        l_n += l_i[split] * alpha
        out += acc[split] * alpha
    return out / l_n


@triton.jit
def _store_heads(out, acc, l_i, pair, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    for member in tl.static_range(GROUP_SIZE):
        result = (acc[member] / l_i[member]).to(out.dtype.element_ty)
        tl.store(out + (pair * GROUP_SIZE + member) * HEAD_DIM + tl.arange(0, HEAD_DIM), result)


@triton.jit
def _store_split(
    partial_acc, partial_ml, semaphores, out, acc, m_i, l_i, pair, split, last, flat,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store this split's partial result; the last of splits 0 .. `last` to finish combines all of them."""
    for member in tl.static_range(GROUP_SIZE):
        line = (pair * NUM_SPLITS + split) * GROUP_SIZE + member
        tl.store(partial_acc + line * HEAD_DIM + flat, acc[member])
        tl.store(partial_ml + line * 2, m_i[member])
        tl.store(partial_ml + line * 2 + 1, l_i[member])
    # Every thread has written before the program increments the semaphore.
    tl.debug_barrier()
    arrived = tl.atomic_add(semaphores + pair, 1, sem="acq_rel", scope="gpu")
    if arrived == last:
        tl.store(semaphores + pair, 0)
        for member in tl.static_range(GROUP_SIZE):
            line = pair * NUM_SPLITS * GROUP_SIZE + member
            added = _combine_splits(partial_acc, partial_ml, line, last, GROUP_SIZE, HEAD_DIM, NUM_SPLITS)
            tl.store(out + (pair * GROUP_SIZE + member) * HEAD_DIM + flat, added.to(out.dtype.element_ty))


@triton.jit
def _store_result(
    partial_acc, partial_ml, semaphores, out, acc, m_i, l_i, pair, split, last, flat,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    # Two conditions, since the first is decided at compile time.
    if NUM_SPLITS == 1:  # noqa: SIM114
        _store_heads(out, acc, l_i, pair, GROUP_SIZE, HEAD_DIM)
    elif last == 0:
        _store_heads(out, acc, l_i, pair, GROUP_SIZE, HEAD_DIM)
    else:
        _store_split(
            partial_acc, partial_ml, semaphores, out, acc, m_i, l_i, pair, split, last, flat,
            GROUP_SIZE, HEAD_DIM, NUM_SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def decode(
    qkv, q_norm, k_norm, cos, sin, keys, values, page_table, slots, positions, partial_acc, partial_ml, semaphores, out,
    count, qkv_stride, page_table_stride, eps, scale,
    NEW_TOKENS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PROGRAMS_PER_KV_HEAD: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, IS_SINGLE_BLOCK: tl.constexpr, IS_NORMED: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(ENABLE_PDL)
    POSITION_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    BLOCK: tl.constexpr = LANES * TILES
    # Programs of one kv head have a group of its query heads each; the first writes the new key and value.
    part_of_head, split, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, is_first = part_of_head // PROGRAMS_PER_KV_HEAD, part_of_head % PROGRAMS_PER_KV_HEAD == 0
    batch, new_token = line, 0
    if NEW_TOKENS > 1:
        batch, new_token = line % count, line // count
    lane, flat = tl.arange(0, LANES)[:, None], tl.arange(0, HEAD_DIM)
    column, partner = flat[None, :], (flat + HEAD_DIM // 2) % HEAD_DIM
    q_weight, q_partner_weight = _load_norm(q_norm, flat, partner, IS_NORMED)
    k_weight, k_partner_weight = _load_norm(k_norm, flat, partner, IS_NORMED)
    pdl_wait(ENABLE_PDL)
    position = tl.load(positions + batch).to(tl.int32) + new_token
    page_numbers = page_table + tl.load(slots + batch) * page_table_stride
    # Issue every load that is known to be needed before the first result is used.
    given = qkv + line * qkv_stride + part_of_head * GROUP_SIZE * HEAD_DIM
    fresh = qkv + line * qkv_stride + (NUM_KV_HEADS * PROGRAMS_PER_KV_HEAD * GROUP_SIZE + head) * HEAD_DIM
    given_queries, query_partners = _load_heads(given, flat, partner, GROUP_SIZE, HEAD_DIM)
    given_key, key_partner = tl.load(fresh + flat), tl.load(fresh + partner)
    new_value = tl.load(fresh + POSITION_STRIDE + column + lane * 0)
    # At most `NUM_SPLITS` splits of whole blocks; the last that is not empty holds the new position.
    if NUM_SPLITS == 1:
        first, last, end = 0, 0, position - new_token
    else:
        split_size = tl.maximum(tl.cdiv(position + 1, NUM_SPLITS * BLOCK) * BLOCK, MIN_SPLIT)
        first, last = split * split_size, position // split_size
        end = tl.minimum(first + split_size, position - new_token)
        if split > last:
            return
    offset = lane * POSITION_STRIDE + column + head * HEAD_DIM
    key, value = _load_kv_tiles(
        keys, values, page_numbers, lane, offset, first, end, PAGE_SIZE * POSITION_STRIDE, PAGE_SIZE, LANES, TILES
    )
    cos_now, sin_now = tl.load(cos + position * HEAD_DIM + flat), tl.load(sin + position * HEAD_DIM + flat)
    number = tl.load(page_numbers + position // PAGE_SIZE).to(tl.int64)
    target = (number * PAGE_SIZE + position % PAGE_SIZE) * POSITION_STRIDE + head * HEAD_DIM
    new_key = _norm_and_rotate(
        given_key, key_partner, k_weight, k_partner_weight, cos_now, sin_now, eps, HEAD_DIM, IS_NORMED
    )
    tl.store(keys + target + flat, new_key, mask=(flat >= 0) & (split == last) & is_first)
    is_new = (lane == 0) & (split == last)
    tl.store(values + target + column + lane * 0, new_value, mask=is_new & is_first)
    # Computed here again: the programs of those tokens may not have written them yet.
    near_keys, near_values = _load_earlier_new_tokens(
        fresh, count * qkv_stride, cos, sin, eps, k_weight, k_partner_weight, lane, flat, partner, position, new_token,
        is_new, NEW_TOKENS, POSITION_STRIDE, HEAD_DIM, IS_NORMED,
    )  # fmt: skip
    # Each lane keeps its own running max and sum, so the loop needs no exchange between threads.
    queries, m_i, l_i, acc = _begin_heads(
        given_queries, query_partners, q_weight, q_partner_weight, cos_now, sin_now, eps, scale, new_key, new_value,
        near_keys, near_values, new_token, is_new, HEAD_DIM, IS_NORMED,
    )  # fmt: skip
    if IS_SINGLE_BLOCK:
        m_i, l_i, acc = _attend_kv_tiles(key, value, first, end, lane, queries, m_i, l_i, acc, LANES)
    else:
        for start in tl.range(first, end, BLOCK):
            next_key, next_value = _load_kv_tiles(
                keys, values, page_numbers, lane, offset, start + BLOCK, end,
                PAGE_SIZE * POSITION_STRIDE, PAGE_SIZE, LANES, TILES,
            )  # fmt: skip
            m_i, l_i, acc = _attend_kv_tiles(key, value, start, end, lane, queries, m_i, l_i, acc, LANES)
            key, value = next_key, next_value
    pair = line * NUM_KV_HEADS * PROGRAMS_PER_KV_HEAD + part_of_head
    m_split, l_split, acc_split = _combine_lanes(m_i, l_i, acc)
    _store_result(
        partial_acc, partial_ml, semaphores, out, acc_split, m_split, l_split, pair, split, last, flat,
        GROUP_SIZE, HEAD_DIM, NUM_SPLITS,
    )  # fmt: skip


@triton.jit
def _attend_block(query, key, value, is_visible, m_i, l_i, acc, scale, operand: tl.constexpr):
    """Update the running max, sum [M] and output [M, D] with a block of keys, masked by `is_visible` [M, N]."""
    score = tl.dot(query.to(operand), tl.trans(key.to(operand)), input_precision="ieee") * scale
    score = tl.where(is_visible, score, -float("inf"))
    m_new = tl.maximum(m_i, tl.max(score, axis=1))
    alpha, p = tl.exp2(m_i - m_new), tl.exp2(score - m_new[:, None])
    acc = tl.dot(p.to(operand), value.to(operand), acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, axis=1), acc


@triton.jit(do_not_specialize=["tokens"])
def varlen(
    queries, keys, values, starts, cached_lengths, slots, page_keys, page_values, page_table, out,
    tokens, query_stride, key_stride, value_stride, page_table_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    # The last tokens have the most keys, so they start first.
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    operand: tl.constexpr = tl.float32 if IS_INTERPRETED else out.dtype.element_ty
    token, column, key_token = start_m + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    is_token = token < tokens
    start = tl.load(starts + token, mask=is_token, other=tokens).to(tl.int32)
    cached = tl.load(cached_lengths + token, mask=is_token, other=0).to(tl.int32)
    token_index = token.to(tl.int64)[:, None]
    query = tl.load(
        queries + token_index * query_stride + head * HEAD_DIM + column[None, :], mask=is_token[:, None], other=0.0
    )
    m_i = tl.full([BLOCK_M], -1e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    key_column = (head // GROUP_SIZE) * HEAD_DIM + column
    # Cached prefixes of the prompts in this block, one prompt after another.
    prompt = tl.min(tl.where(cached > 0, start, tokens))
    while prompt < tokens:
        is_own = start == prompt
        end = tl.max(tl.where(is_own, cached, 0))
        page_numbers = page_table + tl.load(slots + tl.maximum(prompt, start_m)) * page_table_stride
        number = tl.load(page_numbers + key_token // PAGE_SIZE, mask=key_token < end, other=0)
        # More stages would take registers from the loop below, which every prompt runs.
        for start_n in tl.range(0, end, BLOCK_N, num_stages=1):
            at = start_n + key_token
            is_key, key_offset = (at < end)[:, None], number.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
            key_offset = key_offset[:, None] * (NUM_HEADS // GROUP_SIZE * HEAD_DIM)
            number = tl.load(page_numbers + (at + BLOCK_N) // PAGE_SIZE, mask=at + BLOCK_N < end, other=0)
            key = tl.load(page_keys + key_offset + key_column[None, :], mask=is_key, other=0.0)
            value = tl.load(page_values + key_offset + key_column[None, :], mask=is_key, other=0.0)
            is_visible = is_own[:, None] & (at < end)[None, :]
            m_i, l_i, acc = _attend_block(query, key, value, is_visible, m_i, l_i, acc, scale, operand)
        prompt = tl.min(tl.where((cached > 0) & (start > prompt), start, tokens))
    for start_n in tl.range(tl.min(start) // BLOCK_N * BLOCK_N, tl.minimum(start_m + BLOCK_M, tokens), BLOCK_N):
        at = start_n + key_token
        key_offset, is_key = at.to(tl.int64)[:, None], (at < tokens)[:, None]
        key = tl.load(keys + key_offset * key_stride + key_column[None, :], mask=is_key, other=0.0)
        value = tl.load(values + key_offset * value_stride + key_column[None, :], mask=is_key, other=0.0)
        is_visible = (at[None, :] >= start[:, None]) & (at[None, :] <= token[:, None])
        m_i, l_i, acc = _attend_block(query, key, value, is_visible, m_i, l_i, acc, scale, operand)
    target = out + token_index * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column[None, :]
    tl.store(target, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=is_token[:, None])
