"""The Triton kernels of `sonoro.ops.attention` and `sonoro.ops.packed`, which launch them. Importing this needs Triton.

`decode` gives a program a row, a kv head and a part of the row's positions. Its threads stand in lanes of positions: a
few threads read one position in pieces of 16 bytes, and each lane keeps a softmax of its own until the end.
"""

# Tuples grow here while a kernel is compiled, which types do not tell.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from sonoro.ops.norm import launch_dependents, scale_and_weigh, wait_for_inputs

__all__ = ["decode", "packed"]


@triton.jit
def _norm_and_turn(  # noqa: PLR0917 (a kernel's arguments are positional)
    value, partner, weight, partner_weight, cos, sin, eps, width: tl.constexpr, is_normed: tl.constexpr
):
    """`value` [width] normed and turned as the reference rounds it. `partner` holds the other halves of its pairs."""
    dtype: tl.constexpr = value.dtype
    normed = value.to(tl.float32)
    if is_normed:
        inverse = tl.rsqrt(tl.sum(normed * normed, axis=0) * (1.0 / width) + eps)
        normed = scale_and_weigh(normed, inverse, weight, dtype).to(tl.float32)
        other = scale_and_weigh(partner.to(tl.float32), inverse, partner_weight, dtype).to(tl.float32)
    else:
        other = partner.to(tl.float32)
    turned = (normed * cos.to(tl.float32)).to(dtype).to(tl.float32)
    return (turned + other * sin.to(tl.float32)).to(dtype)


@triton.jit
def _load_tiles(  # noqa: PLR0917
    keys,
    values,
    table_row,
    place,
    offset,
    start,
    end,
    page_stride: tl.constexpr,
    page: tl.constexpr,
    lanes: tl.constexpr,
    tiles: tl.constexpr,
):
    """Keys and values of positions `start` .. `end` - 1, `tiles` times [lanes, D] each; zeros past the end."""
    numbers, key, value = (), (), ()
    # A tile lies within one page: `lanes` divides the page and the start.
    for tile in tl.static_range(tiles):
        at = start + tile * lanes
        numbers += (tl.load(table_row + at // page, mask=at < end, other=0).to(tl.int64),)
    for tile in tl.static_range(tiles):
        at = start + tile * lanes
        base = numbers[tile] * page_stride + (at % page) * (page_stride // page)
        is_live = at + place < end
        key += (tl.load(keys + base + offset, mask=is_live, other=0.0),)
        value += (tl.load(values + base + offset, mask=is_live, other=0.0),)
    return key, value


@triton.jit
def _attend_tiles(  # noqa: PLR0917
    key, value, start, end, place, queries, tops, totals, mixes, lanes: tl.constexpr
):
    """The softmax of every query head and lane, [lanes, 1 or D] each, with these tiles added."""
    new_tops, new_totals, new_mixes = (), (), ()
    for member in tl.static_range(len(queries)):
        scores, top = (), tops[member]
        for tile in tl.static_range(len(key)):
            score = tl.sum(queries[member] * key[tile].to(tl.float32), axis=1, keep_dims=True)
            scores += (tl.where(start + tile * lanes + place < end, score, -float("inf")),)
            top = tl.maximum(top, scores[tile])
        kept = tl.exp2(tops[member] - top)
        total, mixed = totals[member] * kept, mixes[member] * kept
        for tile in tl.static_range(len(key)):
            weight = tl.exp2(scores[tile] - top)
            total += weight
            mixed += weight * value[tile].to(tl.float32)
        new_tops += (top,)
        new_totals += (total,)
        new_mixes += (mixed,)
    return new_tops, new_totals, new_mixes


@triton.jit
def _add_parts(  # noqa: PLR0917
    sums, extremes, line, last, group: tl.constexpr, width: tl.constexpr, splits: tl.constexpr
):
    """The softmax-weighted values [width] of parts 0 .. `last`, whose rows are `line` and every `group` after it."""
    flat = tl.arange(0, width)
    tops, totals, mixes = (), (), ()
    for part in tl.static_range(splits):
        at, is_live = line + part * group, part <= last
        # Past the first-level cache, which is not kept up with what other programs write.
        tops += (tl.load(extremes + at * 2, mask=is_live, other=-1e30, cache_modifier=".cg"),)
        totals += (tl.load(extremes + at * 2 + 1, mask=is_live, other=0.0, cache_modifier=".cg"),)
        is_there = (flat >= 0) & is_live
        mixes += (tl.load(sums + at * width + flat, mask=is_there, other=0.0, cache_modifier=".cg"),)
    top = tops[0]
    for part in tl.static_range(1, splits):
        top = tl.maximum(top, tops[part])
    total, mixed = 0.0, tl.zeros([width], tl.float32)
    for part in tl.static_range(splits):
        share = tl.exp2(tops[part] - top)
        total += totals[part] * share
        mixed += mixes[part] * share
    return mixed / total


@triton.jit
def _store_heads(  # noqa: PLR0917
    out, mixes, totals, pair, group: tl.constexpr, width: tl.constexpr
):
    for member in tl.static_range(group):
        result = (mixes[member] / totals[member]).to(out.dtype.element_ty)
        tl.store(out + (pair * group + member) * width + tl.arange(0, width), result)


@triton.jit(do_not_specialize=["count"])
def decode(  # noqa: PLR0915, PLR0917 (one pass over what registers hold)
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    keys,
    values,
    table,
    slots,
    positions,
    sums,
    extremes,
    arrivals,
    out,
    count,
    qkv_stride,
    table_stride,
    eps,
    scale,
    turns: tl.constexpr,
    kv_heads: tl.constexpr,
    share: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    page: tl.constexpr,
    lanes: tl.constexpr,
    tiles: tl.constexpr,
    splits: tl.constexpr,
    shortest: tl.constexpr,
    is_single: tl.constexpr,
    is_normed: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    dtype: tl.constexpr = out.dtype.element_ty
    row_stride: tl.constexpr = kv_heads * width
    block: tl.constexpr = lanes * tiles
    # `share` programs, each with a group of its query heads, share a kv head; the first writes what is new.
    part_of_head, split, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, is_first = part_of_head // share, part_of_head % share == 0
    row, turn = line, 0
    if turns > 1:
        row, turn = line % count, line // count
    place, flat = tl.arange(0, lanes)[:, None], tl.arange(0, width)
    column, partner = flat[None, :], (flat + width // 2) % width
    q_weight, q_partner_weight, k_weight, k_partner_weight = 1.0, 1.0, 1.0, 1.0
    if is_normed:
        q_weight, q_partner_weight = tl.load(q_norm + flat), tl.load(q_norm + partner)
        k_weight, k_partner_weight = tl.load(k_norm + flat), tl.load(k_norm + partner)
    wait_for_inputs(overlap)
    position = tl.load(positions + row).to(tl.int32) + turn
    table_row = table + tl.load(slots + row) * table_stride
    # All that is known to be needed is asked for before the first answer is looked at.
    given = qkv + line * qkv_stride + part_of_head * group * width
    fresh = qkv + line * qkv_stride + (kv_heads * share * group + head) * width
    given_queries, query_partners = (), ()
    for member in tl.static_range(group):
        given_queries += (tl.load(given + member * width + flat),)
        query_partners += (tl.load(given + member * width + partner),)
    given_key, key_partner = tl.load(fresh + flat), tl.load(fresh + partner)
    new_value = tl.load(fresh + row_stride + column + place * 0)
    # A row's positions in at most `splits` parts of whole blocks; the last that holds any holds the new one.
    if splits == 1:
        first, last, end = 0, 0, position - turn
    else:
        part = tl.maximum(tl.cdiv(position + 1, splits * block) * block, shortest)
        first, last = split * part, position // part
        end = tl.minimum(first + part, position - turn)
        if split > last:
            return
    offset = place * row_stride + column + head * width
    key, value = _load_tiles(keys, values, table_row, place, offset, first, end, page * row_stride, page, lanes, tiles)
    turn_cos, turn_sin = tl.load(cos + position * width + flat), tl.load(sin + position * width + flat)
    number = tl.load(table_row + position // page).to(tl.int64)
    target = (number * page + position % page) * row_stride + head * width
    new_key = _norm_and_turn(
        given_key, key_partner, k_weight, k_partner_weight, turn_cos, turn_sin, eps, width, is_normed
    )
    tl.store(keys + target + flat, new_key, mask=(flat >= 0) & (split == last) & is_first)
    is_new = (place == 0) & (split == last)
    tl.store(values + target + column + place * 0, new_value, mask=is_new & is_first)
    # Positions just before, whose programs may not have written them yet.
    near_keys, near_values = (), ()
    for back in tl.static_range(1, turns):
        near, is_there = fresh - back * count * qkv_stride, (flat >= 0) & (turn >= back)
        at = (position - back) * width + flat
        near_key = _norm_and_turn(
            tl.load(near + flat, mask=is_there, other=0.0),
            tl.load(near + partner, mask=is_there, other=0.0),
            k_weight,
            k_partner_weight,
            tl.load(cos + at, mask=is_there, other=0.0),
            tl.load(sin + at, mask=is_there, other=0.0),
            eps,
            width,
            is_normed,
        )
        near_keys += (near_key,)
        near_values += (tl.load(near + row_stride + column + place * 0, mask=is_new & (turn >= back), other=0.0),)
    # Each lane keeps a softmax of its own, so that the loop needs no exchange between threads.
    queries, tops, totals, mixes = (), (), (), ()
    for member in tl.static_range(group):
        query = _norm_and_turn(
            given_queries[member],
            query_partners[member],
            q_weight,
            q_partner_weight,
            turn_cos,
            turn_sin,
            eps,
            width,
            is_normed,
        )
        query = query.to(tl.float32) * scale
        queries += (query[None, :],)
        top, total = tl.sum(query * new_key.to(tl.float32)), 1.0
        mixed = new_value.to(tl.float32)
        for back in tl.static_range(1, turns):
            score = tl.where(turn >= back, tl.sum(query * near_keys[back - 1].to(tl.float32)), -float("inf"))
            raised = tl.maximum(top, score)
            kept, weight = tl.exp2(top - raised), tl.exp2(score - raised)
            total, mixed = total * kept + weight, mixed * kept + weight * near_values[back - 1].to(tl.float32)
            top = raised
        tops += (tl.where(is_new, top, -1e30),)
        totals += (tl.where(is_new, total, 0.0),)
        mixes += (tl.where(is_new, mixed, 0.0),)
    if is_single:
        tops, totals, mixes = _attend_tiles(key, value, first, end, place, queries, tops, totals, mixes, lanes)
    else:
        for start in tl.range(first, end, block):
            next_key, next_value = _load_tiles(
                keys, values, table_row, place, offset, start + block, end, page * row_stride, page, lanes, tiles
            )
            tops, totals, mixes = _attend_tiles(key, value, start, end, place, queries, tops, totals, mixes, lanes)
            key, value = next_key, next_value
    pair = line * kv_heads * share + part_of_head
    outs, out_tops, out_totals = (), (), ()
    for member in tl.static_range(group):
        top = tl.max(tops[member], axis=0, keep_dims=True)
        share = tl.exp2(tops[member] - top)
        out_tops += (tl.sum(top),)
        out_totals += (tl.sum(totals[member] * share),)
        outs += (tl.sum(mixes[member] * share, axis=0),)
    # Not one condition: the first is decided when it is compiled.
    if splits == 1:  # noqa: SIM114
        _store_heads(out, outs, out_totals, pair, group, width)
    elif last == 0:
        _store_heads(out, outs, out_totals, pair, group, width)
    else:
        for member in tl.static_range(group):
            line = (pair * splits + split) * group + member
            tl.store(sums + line * width + flat, outs[member])
            tl.store(extremes + line * 2, out_tops[member])
            tl.store(extremes + line * 2 + 1, out_totals[member])
        # All threads of a program have written before the one that counts it in; the last to come adds up.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived == last:
            tl.store(arrivals + pair, 0)
            for member in tl.static_range(group):
                line = pair * splits * group + member
                added = _add_parts(sums, extremes, line, last, group, width, splits)
                tl.store(out + (pair * group + member) * width + flat, added.to(dtype))


@triton.jit
def _attend_block(  # noqa: PLR0917
    query, key, value, is_seen, largest, total, mixed, scale, operand: tl.constexpr
):
    """The softmax of every token, [T] and [T, D], with a block of positions added of which it sees `is_seen`."""
    score = tl.dot(query.to(operand), tl.trans(key.to(operand)), input_precision="ieee") * scale
    score = tl.where(is_seen, score, -float("inf"))
    raised = tl.maximum(largest, tl.max(score, axis=1))
    kept, weight = tl.exp2(largest - raised), tl.exp2(score - raised[:, None])
    mixed = tl.dot(weight.to(operand), value.to(operand), mixed * kept[:, None], input_precision="ieee")
    return raised, total * kept + tl.sum(weight, axis=1), mixed


@triton.jit(do_not_specialize=["tokens"])
def packed(  # noqa: PLR0917
    queries,
    keys,
    values,
    starts,
    shared,
    slots,
    page_keys,
    page_values,
    table,
    out,
    tokens,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    scale,
    heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    page: tl.constexpr,
    block_t: tl.constexpr,
    block_s: tl.constexpr,
    is_interpreted: tl.constexpr,
):
    # The last tokens have the most to read: they go first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_t
    head = tl.program_id(1)
    operand: tl.constexpr = tl.float32 if is_interpreted else out.dtype.element_ty
    token, column, key_token = first + tl.arange(0, block_t), tl.arange(0, width), tl.arange(0, block_s)
    is_token = token < tokens
    start = tl.load(starts + token, mask=is_token, other=tokens).to(tl.int32)
    before = tl.load(shared + token, mask=is_token, other=0).to(tl.int32)
    place = token.to(tl.int64)[:, None]
    query = tl.load(queries + place * query_stride + head * width + column[None, :], mask=is_token[:, None], other=0.0)
    largest = tl.full([block_t], -1e30, tl.float32)
    total = tl.zeros([block_t], tl.float32)
    mixed = tl.zeros([block_t, width], tl.float32)
    key_column = (head // group) * width + column
    # The prompts of this block that go on from pages, one after the other.
    prompt = tl.min(tl.where(before > 0, start, tokens))
    while prompt < tokens:
        is_own = start == prompt
        end = tl.max(tl.where(is_own, before, 0))
        table_row = table + tl.load(slots + tl.maximum(prompt, first)) * table_stride
        number = tl.load(table_row + key_token // page, mask=key_token < end, other=0)
        # In more stages it takes registers from the loop below, which every prompt runs.
        for low in tl.range(0, end, block_s, num_stages=1):
            at = low + key_token
            is_there, there = (at < end)[:, None], number.to(tl.int64) * page + at % page
            there = there[:, None] * (heads // group * width)
            number = tl.load(table_row + (at + block_s) // page, mask=at + block_s < end, other=0)
            key = tl.load(page_keys + there + key_column[None, :], mask=is_there, other=0.0)
            value = tl.load(page_values + there + key_column[None, :], mask=is_there, other=0.0)
            is_seen = is_own[:, None] & (at < end)[None, :]
            largest, total, mixed = _attend_block(query, key, value, is_seen, largest, total, mixed, scale, operand)
        prompt = tl.min(tl.where((before > 0) & (start > prompt), start, tokens))
    for low in tl.range(tl.min(start) // block_s * block_s, tl.minimum(first + block_t, tokens), block_s):
        at = low + key_token
        there, is_there = at.to(tl.int64)[:, None], (at < tokens)[:, None]
        key = tl.load(keys + there * key_stride + key_column[None, :], mask=is_there, other=0.0)
        value = tl.load(values + there * value_stride + key_column[None, :], mask=is_there, other=0.0)
        is_seen = (at[None, :] >= start[:, None]) & (at[None, :] <= token[:, None])
        largest, total, mixed = _attend_block(query, key, value, is_seen, largest, total, mixed, scale, operand)
    target = out + place * (heads * width) + head * width + column[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_token[:, None])
