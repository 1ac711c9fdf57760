"""Tree attention for a pass over new nodes: a dense prefix from the slot cache, then only the ancestors in the tree.

Legend: B rows, n nodes, Hq query heads on Hkv key/value heads, S slots in view, d and e the widths of a key and a value.
Node i of row b sees the slots before length[b], and slot length[b] + j where bit j of its words is set. A node that sees
nothing gets zeros.

Bytes that a call must move: K and V once, sum over b of (length[b] + 32 W) * Hkv * (d + e), Q and the output once,
B * n * Hq * (d + e), both times the item size, and 4 * B * n * W for the words. With 64 nodes, 32 heads on 8, width 128
in bfloat16 and a prefix of 8192 these are 34, 1 and 0.0005 MB; copying K and V for every head first makes 34 into 300.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specresearch.kernels.backend import interpreted, jit, on_triton, power_of_2, tl, triton
from specresearch.kernels.mask import unpack

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # keys and values of one head
MOST_SPLITS = 32


def serves(like: Tensor, width: int) -> bool:
    """Whether Triton is to compute it for queries of this type and device; torch computes the rest, whatever is chosen."""
    return on_triton(like) and like.dtype in KERNEL_DTYPES and width <= WIDEST


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: Tensor | None,
    length: Tensor,
    scale: float | None = None,
    dense: Tensor | None = None,
) -> Tensor:
    """query [B, Hq, n, d], key [B, Hkv, S, d], value [B, Hkv, S, e] (views of any strides), words int32 [B, n, W] as
    `mask.pack_words` makes them, length [B] -> [B, n, Hq, e]. `scale` = 1 / sqrt(d) if None.

    `dense` [B, 1, n, S], added to the scores, is the same mask laid out once for many calls; torch takes it instead of
    `words`, Triton never looks at it.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if words is not None and serves(query, max(key.shape[-1], value.shape[-1])):
        return _triton(query, key, value, words, length, scale)
    if dense is None:
        assert words is not None
        dense = additive(unpack(words, 32 * words.shape[-1]), length, key.shape[2], query.dtype)
    return on_torch(query, key, value, dense, scale, folds(query))


def seen_slots(mask: Tensor, length: Tensor, slots: int) -> Tensor:
    """mask bool [B, n, M] over the slots from `length` [B] on, those before them visible -> bool [B, n, slots]"""
    relative = torch.arange(slots, device=mask.device) - length[:, None]
    inside = (relative >= 0) & (relative < mask.shape[-1])
    index = relative.clamp(0, mask.shape[-1] - 1)[:, None].expand(-1, mask.shape[1], -1)
    return (mask.gather(-1, index) & inside[:, None]) | (relative < 0)[:, None]


def additive(mask: Tensor, length: Tensor, slots: int, dtype: torch.dtype, blocked: float = -math.inf) -> Tensor:
    """`seen_slots` as numbers to add to the scores: 0 and `blocked` [B, 1, n, slots]"""
    seen = seen_slots(mask, length, slots)
    return torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill_(~seen, blocked)[:, None]


def folds(query: Tensor) -> bool:
    """Whether the heads that share K and V are better made rows of one head: on a GPU torch would materialise the scores
    otherwise, on a CPU a single bfloat16 query is ten times faster so, and a single float32 one slower by a third."""
    return query.is_cuda or (query.shape[2] == 1 and query.dtype != torch.float32)


def on_torch(query: Tensor, key: Tensor, value: Tensor, dense: Tensor, scale: float, fold: bool) -> Tensor:
    batch, heads, nodes, _ = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if not fold:
        out = scaled_dot_product_attention(query, key, value, attn_mask=dense, scale=scale, enable_gqa=group > 1)
        return out.transpose(1, 2).contiguous()
    query = query.unflatten(1, [kv_heads, group]).transpose(2, 3).flatten(2, 3)
    dense = dense if nodes == 1 else dense.repeat_interleave(group, 2)
    out = scaled_dot_product_attention(query, key, value, attn_mask=dense, scale=scale)
    return out.unflatten(2, [nodes, group]).transpose(1, 2).reshape(batch, nodes, heads, -1)


# -- Triton ------------------------------------------------------------------------------------------------------------


def tiles(rows: int, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Query rows and keys of a tile, warps, stages; they fit the registers and the shared memory of an H100 or H200."""
    if dtype == torch.float32:  # without tensor cores every product needs its registers
        return (min(max(power_of_2(rows), 16), 32), 32, 8, 2) if width <= 64 else (16, 16, 8, 2)
    most = 128 if width <= 128 else 64
    tile = min(max(power_of_2(rows), 16), most)
    return tile, 64, 8 if tile == 128 or width > 128 else 4, 3 if width <= 128 else 2


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_for(programs: int, slots: int, processors: int) -> int:
    """Parts of the prefix that are worked on side by side: enough to fill the GPU twice, none shorter than 256 slots."""
    wanted = min(2 * processors // max(programs, 1), slots // 256, MOST_SPLITS)
    return power_of_2(wanted + 1) // 2 if wanted > 1 else 1


def _triton(query: Tensor, key: Tensor, value: Tensor, words: Tensor, length: Tensor, scale: float) -> Tensor:
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, heads, nodes, width = query.shape
    kv_heads, slots, value_width = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    padded, value_padded = max(power_of_2(width), 16), max(power_of_2(value_width), 16)
    tile, block, warps, stages = tiles(nodes * group, max(padded, value_padded), query.dtype)
    parts = triton.cdiv(nodes * group, tile)
    splits = splits_for(parts * batch * kv_heads, slots, _processors(query.device))
    out = query.new_empty(batch, nodes, heads, value_width)
    total = batch * nodes * heads
    partial = query.new_empty(splits * total if splits > 1 else 0, value_width, dtype=torch.float32)
    weight = query.new_empty(2, splits * total if splits > 1 else 0, dtype=torch.float32)
    words, length = words.contiguous(), length.contiguous()
    _attend[(parts, batch * kv_heads, splits)](
        *(query, key, value, words, length, out, partial, weight, scale * math.log2(math.e)),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        *(nodes, slots, kv_heads, words.shape[2], width, value_width, total, splits),
        **{"GROUP": group, "D": padded, "E": value_padded, "TILE": tile, "BLOCK": block, "SPLIT": splits > 1},
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        WIDEN=interpreted(),  # the interpreter multiplies the bit patterns of bfloat16
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _combine[(total,)](partial, weight, out, total, value_width, E=value_padded, SPLITS=splits, num_warps=1)
    return out


@jit
def _update(
    q, k, value, scale, seen, peak, mass, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """One block of keys into the running maximum, sum and weighted sum of the values; scores are logarithms to base 2."""
    narrow = value.dtype
    if WIDEN:
        q, k, value = q.to(tl.float32), k.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    share = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    mass = mass * shrink + tl.sum(share, 1)
    acc = tl.dot(share.to(narrow).to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    return higher, mass, acc


@jit
def _attend(
    query, key, value, words, length, out, partial, weight, scale,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    nodes, slots, kv_heads, width, key_width, value_width, total, splits,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)  # the group's heads of node 0, of node 1, ...
    node, own = line // GROUP, head * GROUP + line % GROUP
    real = node < nodes
    column, value_column = tl.arange(0, D), tl.arange(0, E)
    has, value_has = (column < key_width)[None, :], (value_column < value_width)[None, :]
    place = row * query_row + own * query_head + node * query_node
    q = tl.load(query + place[:, None] + column[None, :], mask=real[:, None] & has, other=0.0)
    key += row * key_row + head * key_head
    value += row * value_row + head * value_head
    peak = tl.zeros([TILE], tl.float32) - 1e30  # finite, so that a row that sees nothing has weights of 0, not NaN
    mass = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, E], tl.float32)

    prefix = tl.minimum(tl.load(length + row).to(tl.int32), slots)
    share = tl.cdiv(tl.cdiv(prefix, BLOCK), splits) * BLOCK  # of each split, whole blocks
    begin = tl.minimum(split * share, prefix)
    end = tl.minimum(begin + share, prefix)
    whole = begin + (end - begin) // BLOCK * BLOCK
    step = tl.arange(0, BLOCK)
    keys = step[:, None] * key_slot + column[None, :]
    values = step[:, None] * value_slot + value_column[None, :]
    for start in range(begin, whole, BLOCK):
        at = tl.cast(start, tl.int64)
        k = tl.load(key + at * key_slot + keys, mask=has, other=0.0)
        v = tl.load(value + at * value_slot + values, mask=value_has, other=0.0)
        peak, mass, acc = _update(q, k, v, scale, real[:, None], peak, mass, acc, False, PRECISION, WIDEN)
    if whole < end:
        at = tl.cast(whole, tl.int64)
        left = step < end - whole
        k = tl.load(key + at * key_slot + keys, mask=has & left[:, None], other=0.0)
        v = tl.load(value + at * value_slot + values, mask=value_has & left[:, None], other=0.0)
        peak, mass, acc = _update(q, k, v, scale, left[None, :], peak, mass, acc, True, PRECISION, WIDEN)

    if split == splits - 1:
        bit = tl.arange(0, 32)
        few_keys = bit[:, None] * key_slot + column[None, :]
        few_values = bit[:, None] * value_slot + value_column[None, :]
        for word in range(0, width):  # the tree: the 32 nodes of one word at a time
            sees = tl.load(words + (row * nodes + node) * width + word, mask=real, other=0)
            behind = tl.cast(prefix + word * 32, tl.int64)
            inside = (bit < slots - behind)[:, None]
            few_k = tl.load(key + behind * key_slot + few_keys, mask=has & inside, other=0.0)
            few_v = tl.load(value + behind * value_slot + few_values, mask=value_has & inside, other=0.0)
            seen = (((sees[:, None] >> bit[None, :]) & 1) != 0) & (bit < slots - behind)[None, :]
            peak, mass, acc = _update(q, few_k, few_v, scale, seen, peak, mass, acc, True, PRECISION, WIDEN)

    place = (row * nodes + node) * (kv_heads * GROUP) + own
    if SPLIT:
        place += split.to(tl.int64) * total
        tl.store(partial + place[:, None] * value_width + value_column[None, :], acc, mask=real[:, None] & value_has)
        tl.store(weight + place, peak, mask=real)
        tl.store(weight + splits.to(tl.int64) * total + place, mass, mask=real)
    else:
        acc /= tl.where(mass > 0, mass, 1.0)[:, None]
        acc = acc.to(out.dtype.element_ty)
        tl.store(out + place[:, None] * value_width + value_column[None, :], acc, mask=real[:, None] & value_has)


@jit
def _combine(partial, weight, out, total, value_width, E: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one head of one node, each weighed by its own maximum against the largest."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS).to(tl.int64) * total + place
    column = tl.arange(0, E)
    has = column < value_width
    peak = tl.load(weight + part)
    factor = tl.exp2(peak - tl.max(peak, 0))
    mass = tl.sum(tl.load(weight + SPLITS * tl.cast(total, tl.int64) + part) * factor, 0)
    acc = tl.load(partial + part[:, None] * value_width + column[None, :], mask=has[None, :], other=0.0)
    acc = tl.sum(acc * factor[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(out + place * value_width + column, acc.to(out.dtype.element_ty), mask=has)
