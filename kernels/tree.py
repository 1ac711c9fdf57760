"""Tree arithmetic from parent pointers: ancestors, links, paths, and back; and EAGLE-2's re-ranking.

Legend: B batch, N nodes (root = 0), C candidates. -1 = none. A parent outside [0, N) is none too, and every walk is
bounded, so that a malformed tree costs no more than a good one and never reads another row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specresearch.kernels.backend import jit, on_triton, power_of_2, tl, triton
from specresearch.kernels.mask import pack_words, unpack, words_of


def climb(parent: Tensor, hops: int) -> tuple[Tensor, Tensor]:
    """Each node and what stands above it, at most `hops` nodes in all -> seen bool [B, N, N], count [B, N].

    Pointer doubling: strides of 1, 2, 4 ... are composed to `hops`. A repeated node (a cycle) counts again.
    """
    batch, nodes = parent.shape
    none = nodes  # a spare last entry stands for "nobody"
    rows = torch.arange(batch, device=parent.device)[:, None]
    stride = pad(torch.where((parent >= 0) & (parent < nodes), parent, none), (0, 1), value=none)
    seen = torch.eye(nodes + 1, nodes, dtype=torch.bool, device=parent.device).expand(batch, -1, -1)
    count = (torch.arange(nodes + 1, device=parent.device) < none).long().expand(batch, -1)
    at = torch.arange(nodes + 1, device=parent.device).expand(batch, -1)
    total, all_seen = torch.zeros_like(count), torch.zeros_like(seen)
    for bit in range(hops.bit_length()):
        if hops >> bit & 1:
            all_seen, total, at = all_seen | seen[rows, at], total + count[rows, at], stride[rows, at]
        if hops >> bit > 1:
            seen, count, stride = seen | seen[rows, stride], count + count[rows, stride], stride[rows, stride]
    return all_seen[:, :none], total[:, :none]


def ancestors(parent: Tensor, levels: int | None = None) -> Tensor:
    """parent [B, N] -> bool [B, N, N]: entry (i, j) says that j is i itself or an ancestor of i; nothing lies deeper than
    `levels`, if given."""
    hops = parent.shape[1] if levels is None else levels + 1
    if on_triton(parent):
        return unpack(_structure_triton(parent, None, hops)[0], parent.shape[1])
    return climb(parent, hops)[0]


def ancestor_words(parent: Tensor, levels: int) -> Tensor:
    """The same, packed -> int32 [B, N, ceil(N / 32)]"""
    if on_triton(parent):
        return _structure_triton(parent, None, levels + 1)[0]
    return pack_words(climb(parent, levels + 1)[0])


def depths(parent: Tensor) -> Tensor:
    """[B, N], the root's is 0. A node's position is the prefix's length plus its depth."""
    if on_triton(parent):
        return _structure_triton(parent, None, parent.shape[1])[1] - 1
    return climb(parent, parent.shape[1])[1] - 1


def links(parent: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """First child and next sibling of every node, [B, N] each; nodes that are not `valid` are linked by nobody
    and have no sibling."""
    if on_triton(parent):
        return _structure_triton(parent, valid, 0)[2:]
    batch, nodes = parent.shape
    linked = (parent >= 0) & (parent < nodes)
    linked[:, 0] = False
    if valid is not None:
        linked &= valid
    owner, order = torch.where(linked, parent, nodes).sort(
        dim=1, stable=True
    )  # children of one node stand side by side
    last = torch.full_like(owner[:, :1], nodes)
    after, follows = pad(order[:, 1:], (0, 1), value=-1), torch.cat([owner[:, 1:], last], 1) == owner
    next_sibling = torch.empty_like(order).scatter_(1, order, torch.where(follows & (owner < nodes), after, -1))
    heads = torch.where(owner != torch.cat([last - nodes - 1, owner[:, :-1]], 1), owner, nodes)
    first_child = torch.full((batch, nodes + 1), -1, device=parent.device).scatter_(1, heads, order)
    return first_child[:, :nodes], next_sibling


def paths(parent: Tensor, levels: int) -> Tensor:
    """Nodes from the root down to each node, [B, N, levels + 1], -1 padded at the end."""
    batch, nodes = parent.shape
    seen = ancestors(parent, levels)
    rank = torch.where(seen, seen.long().cumsum(-1) - 1, levels + 1).clamp(max=levels + 1)
    path = torch.full((batch, nodes, levels + 2), -1, dtype=torch.long, device=parent.device)
    index = torch.arange(nodes, device=parent.device).expand(batch, nodes, -1)
    return path.scatter_(-1, rank, index)[..., :-1]  # all but ancestors land in the spare last column


def node_paths(parent: Tensor, tokens: Tensor, levels: int) -> Tensor:
    """Tokens from below the root down to each node, [B, N, levels], -1 padded at the end."""
    path = paths(parent, levels)[..., 1:]
    found = tokens[:, None].expand(-1, parent.shape[1], -1).gather(-1, path.clamp(min=0))
    return torch.where(path >= 0, found, -1)


def leaf_paths(parent: Tensor, valid: Tensor, levels: int) -> Tensor:
    """`paths` of the leaves; the rows of other nodes are all -1. [B, N, levels + 1]"""
    leaf = valid & (links(parent, valid)[0] < 0)
    return torch.where(leaf[..., None], paths(parent, levels), -1)


def parents_of_mask(mask: Tensor) -> Tensor:
    """Ancestor mask bool [B, N, N], parents before children -> parent [B, N]: the last column set left of the diagonal."""
    nodes = mask.shape[-1]
    index = torch.arange(nodes, device=mask.device)
    return torch.where(mask & (index < index[:, None]), index, -1).amax(-1)


def parents_of_links(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """Links [B, N] -> parent [B, N]; -1 for nodes that no list holds."""
    nodes = first_child.shape[1]
    none = nodes
    index = torch.arange(nodes, device=first_child.device).expand_as(first_child)

    def inverse(link: Tensor) -> Tensor:
        good = (link >= 0) & (link < nodes)
        out = torch.full_like(link[:, :1], none).repeat(1, nodes + 1)
        return out.scatter_(1, torch.where(good, link, none), torch.where(good, index, none))

    owner, before = inverse(first_child), inverse(next_sibling)
    owner[:, none] = before[:, none] = none
    for _ in range(nodes.bit_length()):  # the head of a list tells its owner to all behind it
        owner = torch.where(owner == none, owner.gather(1, before), owner)
        before = before.gather(1, before)
    return torch.where(owner < none, owner, -1)[:, :nodes]


def organize(score: Tensor, parent: Tensor, count: int, levels: int) -> Tensor:
    """EAGLE-2's re-ranking (arXiv:2406.16858, section 4.2): the best `count` candidates -> indices [B, count], ascending.

    `score` [B, C]; `parent` [B, C] = a candidate of lower index, -1 below the root; none lies more than `levels` deep. A
    candidate never counts for more than its parent and ties go to the lower index, so no child is kept without its parent
    however probabilities were rounded. NaN counts as the lowest.
    """
    score = torch.where(score.isnan(), -torch.inf, score)
    none = score.shape[1]
    stride = pad(torch.where((parent >= 0) & (parent < none), parent, none), (0, 1), value=none)
    score = pad(score, (0, 1), value=torch.inf)
    for _ in range(max(levels - 1, 0).bit_length()):
        score, stride = torch.minimum(score, score.gather(1, stride)), stride.gather(1, stride)
    best = score[:, :none].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return best.sort(1).values


# -- Triton ------------------------------------------------------------------------------------------------------------


def _structure_triton(parent: Tensor, valid: Tensor | None, hops: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ancestor words int32 [B, N, W], count, first child, next sibling [B, N] in one launch."""
    batch, nodes = parent.shape
    parent = parent.long().contiguous()
    words = torch.empty(batch, nodes, words_of(nodes), dtype=torch.int32, device=parent.device)
    count, child, sibling = (torch.empty_like(parent) for _ in range(3))
    tile = min(power_of_2(nodes), 32)
    valid = parent if valid is None else valid.contiguous()
    _structure[(batch, triton.cdiv(nodes, tile))](
        *(parent, valid, words, count, child, sibling, nodes, hops, words.shape[2]),
        VALID=valid is not parent,
        WORDS=power_of_2(words.shape[2]),
        TILE=tile,
        num_warps=1 if nodes <= 128 else 4,
    )
    return words, count, child, sibling


@jit
def _structure(
    parent, valid, words, count, child, sibling, nodes, hops, width,
    VALID: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = node < nodes
    base = parent + row * nodes
    out = row * nodes + node
    word = tl.arange(0, WORDS)[None, :]

    at = tl.where(inside, node, -1)
    bits = tl.zeros([TILE, WORDS], tl.int32)
    seen = tl.zeros([TILE], tl.int64)
    for _ in range(hops):
        bits |= tl.where((at >= 0)[:, None] & (word == (at >> 5)[:, None]), (1 << (at & 31))[:, None], 0)
        seen += (at >= 0).to(tl.int64)
        up = tl.load(base + at, mask=at >= 0, other=-1)
        at = tl.where((up >= 0) & (up < nodes), up, -1).to(tl.int32)
    tl.store(words + out[:, None] * width + word, bits, mask=inside[:, None] & (word < width))
    tl.store(count + out, seen, mask=inside)

    own = tl.load(base + node, mask=inside & (node > 0), other=-1)
    own = tl.where((own >= 0) & (own < nodes), own, -1)
    if VALID:
        own = tl.where(tl.load(valid + out, mask=inside, other=0) != 0, own, -1)
    first = tl.zeros([TILE], tl.int32) + nodes
    after = tl.zeros([TILE], tl.int32) + nodes
    for start in range(0, nodes, TILE):
        other = start + tl.arange(0, TILE)
        up = tl.load(base + other, mask=(other < nodes) & (other > 0), other=-1)
        if VALID:
            up = tl.where(tl.load(valid + row * nodes + other, mask=other < nodes, other=0) != 0, up, -1)
        mine = up[None, :] == node[:, None]
        first = tl.minimum(first, tl.min(tl.where(mine, other[None, :], nodes), axis=1))
        next_to = (up[None, :] == own[:, None]) & (own >= 0)[:, None] & (other[None, :] > node[:, None])
        after = tl.minimum(after, tl.min(tl.where(next_to, other[None, :], nodes), axis=1))
    tl.store(child + out, tl.where(first < nodes, first, -1).to(tl.int64), mask=inside)
    tl.store(sibling + out, tl.where(after < nodes, after, -1).to(tl.int64), mask=inside)
