"""Temperature, truncation and inverse-CDF draws over the vocabulary. Legend: R rows, V vocabulary.

The Triton kernels read a row from memory once (8 bytes a token in and out); the passes that follow find it in the L2
cache. They find a truncation's threshold digit by digit in the bits of the values, with no sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.kernels.backend import jit, on_triton, power_of_2, tl

Parameter = Tensor | float | int  # one for all rows, or one a row [R]


def raise_half(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def warp(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Logits [..., V] -> probabilities, in transformers' order and with its tie rules.

    Ties with the k-th value all stay. Of ties at the edge of top-p as many stay as are needed: in torch those that its
    sort, which is not stable, puts last, as in transformers; in Triton those of higher index.

    At temperature 0 the law is one-hot at the first argmax. A row that is no law (NaN, +inf or all -inf) becomes NaN.
    Half precision is raised to float32, float64 stays.
    """
    if on_triton(logits) and logits.dtype != torch.float64:
        return _warp_triton(logits, temperature, top_k, top_p, min_p)
    logits = raise_half(logits)
    if temperature == 0:
        top, index = logits.max(-1, keepdim=True)
        zero = 0.0 * top + 0.0  # NaN where top is NaN or infinite
        return zero.expand_as(logits).scatter(-1, index, 1.0 + zero)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1)
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    probs = logits.softmax(-1)
    if min_p > 0:
        top = probs.amax(-1, keepdim=True)
        probs = logits.masked_fill(probs < min_p * top, -torch.inf).softmax(-1)
    return probs


PARTS = 64


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of x [..., V] in falling order -> values, indices [..., count]; NaN counts as the largest.

    On a CPU `topk` and `max` with an index look at one number at a time, `amax` at many: an element is among the largest
    only if its part of the row is among the parts of largest maxima, so few are looked at one by one. 0.36 ms become 0.06
    for 6 rows of 49152.
    """
    vocab = x.shape[-1]
    if x.device.type != "cpu" or count > PARTS or vocab % PARTS or vocab < 64 * PARTS:
        return x.topk(count, dim=-1)
    parts = x.unflatten(-1, (PARTS, -1))
    width = vocab // PARTS
    if count == 1:
        best = parts.amax(-1).argmax(-1, keepdim=True)
        values, place = parts.gather(-2, best[..., None].expand(*best.shape, width)).flatten(-2).max(-1, keepdim=True)
        return values, best * width + place
    best = parts.amax(-1).topk(count, dim=-1).indices.sort(-1).values  # ascending, so that ties go the way they would
    few = parts.gather(-2, best[..., None].expand(*best.shape, parts.shape[-1]))
    values, place = few.flatten(-2).topk(count, dim=-1)
    return values, best.gather(-1, place // width) * width + place % width


def top_k_renorm(probs: Tensor, top_k: Parameter) -> Tensor:
    """Keep the `top_k` largest of each row [R, V] (ties with the last all stay) and renormalise. k < 1 keeps all; a row
    without mass becomes NaN."""
    k = _per_row(top_k, probs, torch.long)
    k = torch.where((k < 1) | (k > probs.shape[1]), probs.shape[1], k)
    if on_triton(probs) and probs.dtype == torch.float32:
        return _renorm_triton(probs, k, mass=False)
    kth = probs.sort(dim=-1, descending=True).values.gather(1, k[:, None] - 1)
    return _normalise(torch.where(probs < kth, 0.0, probs))  # NaN stays, and spreads


def top_p_renorm(probs: Tensor, top_p: Parameter) -> Tensor:
    """Keep the fewest most probable tokens of each row [R, V] whose share reaches `top_p` (ties with the last all stay) and
    renormalise. p >= 1 keeps all, p <= 0 the most probable; a row without mass becomes NaN."""
    p = _per_row(top_p, probs, torch.float64)
    if on_triton(probs) and probs.dtype == torch.float32:
        return _renorm_triton(probs, p, mass=True)
    ordered = probs.sort(dim=-1, descending=True).values
    above = ordered.double().cumsum(-1) - ordered
    kept = (above < p[:, None] * ordered.double().sum(-1, keepdim=True)) | (p[:, None] >= 1)
    kept[:, 0] = True
    least = torch.where(kept, ordered, torch.inf).amin(-1, keepdim=True)
    return _normalise(torch.where(probs < least, 0.0, probs))


def _per_row(value: Parameter, probs: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(probs.device, dtype).expand(probs.shape[0])
    return torch.full((probs.shape[0],), value, dtype=dtype, device=probs.device)


def _normalise(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF: the smallest index whose cumulated weight exceeds uniform * total; weights [..., V], uniform [...] in
    [0, 1) -> [...]. An index of weight 0 is never returned; -1 where the weights are NaN or all 0."""
    if on_triton(weights):
        return _pick_triton(weights, uniform)
    cumulated = weights.double().cumsum(-1)
    total = cumulated[..., -1:].contiguous()
    index = torch.searchsorted(cumulated, uniform.double().unsqueeze(-1) * total, right=True)
    last = torch.searchsorted(cumulated, total)  # rounding may push uniform * total up to total
    index = torch.minimum(index, last).squeeze(-1)
    return torch.where(total.squeeze(-1) > 0, index, -1)


# -- Triton ------------------------------------------------------------------------------------------------------------


def _block(vocab: int) -> int:
    return min(power_of_2(vocab), 1024)


def _warp_triton(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    vocab = logits.shape[-1]
    rows = logits.reshape(-1, vocab).contiguous()
    out = torch.empty_like(rows, dtype=torch.float32)
    _warp[(rows.shape[0],)](
        *(rows, out, vocab, float(temperature or 1), float(top_k), 1.0 - top_p, float(min_p)),
        GREEDY=temperature == 0,
        TOP_K=0 < top_k < vocab,
        TOP_P=top_p < 1,
        BLOCK=_block(vocab),
        num_warps=8,
    )
    return out.view(logits.shape)


def _renorm_triton(probs: Tensor, want: Tensor, mass: bool) -> Tensor:
    probs = probs.contiguous()
    out = torch.empty_like(probs)
    _renorm[(probs.shape[0],)](
        probs, out, want.double().contiguous(), probs.shape[1], mass, _block(probs.shape[1]), num_warps=8
    )
    return out


def _pick_triton(weights: Tensor, uniform: Tensor) -> Tensor:
    vocab = weights.shape[-1]
    rows = weights.reshape(-1, vocab).contiguous()
    out = torch.empty(rows.shape[0], dtype=torch.long, device=weights.device)
    _pick[(rows.shape[0],)](rows, uniform.reshape(-1).double().contiguous(), out, vocab, _block(vocab))
    return out.view(uniform.shape)


@jit
def _pick(weights, uniform, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, pick_row(weights + row * vocab, tl.load(uniform + row), vocab, BLOCK))


@jit
def sum_row(weights, vocab, BLOCK: tl.constexpr):
    """Sum of one row, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(weights + at, mask=at < vocab, other=0.0).to(tl.float64)
    return tl.sum(total)


@jit
def pick_row(weights, uniform, vocab, BLOCK: tl.constexpr):
    """`pick` of one row -> int64."""
    total = sum_row(weights, vocab, BLOCK)
    found = tl.full([], -1, tl.int64)
    last = tl.full([], -1, tl.int64)  # the last index of positive weight, in case that rounding finds none
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + at, mask=at < vocab, other=0.0).to(tl.float64)
        over = (before + tl.cumsum(weight) > uniform * total) & (weight > 0)
        first = tl.min(tl.where(over, at, vocab)).to(tl.int64)
        found = tl.where((found < 0) & (first < vocab), first, found)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, -1)).to(tl.int64))
        before += tl.sum(weight)
    return tl.where(total > 0, tl.where(found >= 0, found, last), -1)


@jit
def _key(value):
    """float32 -> int64 in [0, 2^32) with the same order (-0 counts as 0, NaN as the largest)."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return tl.where(value == value, key, 0xFFFFFFFF)


@jit
def _threshold(values, vocab, heat, top, least, want, MASS: tl.constexpr, EXP: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key v such that the tokens of key >= v (and >= `least`) measure at least `want`, four bits at a time.

    A token measures 1, or with MASS its weight: exp(value / heat - top) with EXP, else the value itself. Also returns how
    much of the tokens of key v themselves is still wanted.
    """
    digits = tl.arange(0, 16)[None, :]
    prefix = tl.full([], 0, tl.int64)
    want = want + tl.full([], 0.0, tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        measure = tl.zeros([16], tl.float64)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < vocab, other=0.0).to(tl.float32)
            if EXP:
                value = tl.div_rn(value, heat)
            key = _key(value)
            same = (at < vocab) & (key >> (shift + 4) == prefix) & (key >= least)
            weight = tl.where(same, 1.0, 0.0)
            if MASS:
                weight = tl.where(same, tl.exp(value - top) if EXP else value, 0.0)
            share = tl.where(((key >> shift) & 15)[:, None] == digits, weight[:, None], 0.0)
            measure += tl.sum(share, axis=0).to(tl.float64)
        upward = tl.sum(tl.where(tl.arange(0, 16)[:, None] >= digits, measure[:, None], 0.0), axis=0)
        digit = tl.max(tl.where(upward >= want, tl.arange(0, 16), 0))
        want -= tl.sum(tl.where(tl.arange(0, 16) > digit, measure, 0.0))
        prefix = prefix * 16 + digit.to(tl.int64)
    return prefix, want


@jit
def _warp(
    logits, out, vocab, temperature, top_k, drop, min_p,
    GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    out += row * vocab
    nan = float("nan")
    heat = 1.0 if GREEDY else temperature
    top = tl.full([], float("-inf"), tl.float32)
    where = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        value = tl.div_rn(value, heat)
        broken += tl.sum((value != value).to(tl.int32))
        value = tl.where(value != value, float("-inf"), value)
        best = tl.max(value)
        where = tl.where(best > top, start + tl.argmax(value, axis=0), where)
        top = tl.maximum(top, best)
    broken = (broken > 0) | (top == float("inf")) | (top == float("-inf"))
    if broken:
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, tl.full([BLOCK], nan, tl.float32), mask=at < vocab)
    elif GREEDY:
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, tl.where(at == where, 1.0, 0.0), mask=at < vocab)
    else:
        least = tl.full([], 0, tl.int64)
        if TOP_K:
            least, _ = _threshold(logits, vocab, heat, top, least, top_k, False, True, BLOCK)
        edge = tl.full([], -1, tl.int64)
        kept = tl.full([], 0, tl.int32)  # how many tokens of key `edge` stay, counted from the last
        ties = tl.full([], 0, tl.int32)
        if TOP_P:
            total = tl.full([], 0.0, tl.float64)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                value = tl.div_rn(value, heat)
                total += tl.sum(tl.where(_key(value) >= least, tl.exp(value - top), 0.0)).to(tl.float64)
            # Ascending, a token goes if what lies up to it is at most drop * total; so, descending, it stays if what lies
            # above it is less than the rest.
            want = tl.maximum(total - drop * total, 1e-300)  # at least one token stays
            edge, wanted = _threshold(logits, vocab, heat, top, least, want, True, True, BLOCK)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                value = tl.div_rn(value, heat)
                same = (at < vocab) & (_key(value) == edge)
                ties += tl.sum(same.to(tl.int32))
                each = tl.max(tl.where(same, tl.exp(value - top), 0.0)).to(tl.float64)
                kept = tl.where(each > 0, tl.ceil(wanted / each).to(tl.int32), kept)
            least = tl.maximum(least, edge)
            kept = tl.maximum(tl.minimum(kept, ties), 1)
        skip = ties - kept  # the first ties that go
        total = tl.full([], 0.0, tl.float64)
        passed = tl.full([], 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            value = tl.div_rn(value, heat)
            key = _key(value)
            tie = (at < vocab) & (key == edge)
            rank = passed + tl.cumsum(tie.to(tl.int32))
            passed += tl.sum(tie.to(tl.int32))
            weight = tl.exp(value - top)
            stays = (at < vocab) & (key >= least) & ((~tie) | (rank > skip)) & (weight >= min_p)
            weight = tl.where(stays, weight, 0.0)
            tl.store(out + at, weight, mask=at < vocab)
            total += tl.sum(weight).to(tl.float64)
        tl.debug_barrier()
        share = (1.0 / total).to(tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(out + at, mask=at < vocab, other=0.0) * share, mask=at < vocab)


@jit
def _renorm(probs, out, want, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    probs += row * vocab
    out += row * vocab
    want = tl.load(want + row)
    least = tl.full([], 0, tl.int64)
    if MASS:
        if want < 1:
            total = sum_row(probs, vocab, BLOCK)
            tiny = tl.full([], 1e-300, tl.float64)  # at least one token stays
            least, _ = _threshold(probs, vocab, 1.0, 0.0, least, tl.maximum(want * total, tiny), True, False, BLOCK)
    else:
        least, _ = _threshold(probs, vocab, 1.0, 0.0, least, want, False, False, BLOCK)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(probs + at, mask=at < vocab, other=0.0)
        total += tl.sum(tl.where(_key(value.to(tl.float32)) >= least, value, 0.0)).to(tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(probs + at, mask=at < vocab, other=0.0)
        stays = _key(value.to(tl.float32)) >= least
        tl.store(out + at, (tl.where(stays, value, 0.0) / total).to(value.dtype), mask=at < vocab)
