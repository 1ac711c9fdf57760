"""Which tokens the grammar allows, for whole trees at once. Legend: B rows, N nodes, W frontier width, V vocabulary.

A mask has a bit a token, int32 [..., ceil(V / 32)], least significant first: kernels/mask.py's `pack_words`. The depth-first
walk over first-child and next-sibling links, with rollback, is the one that SGLang does for its trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specresearch.kernels.mask import words_of
from specresearch.kernels.tree import links
from specresearch.types import Frontier, Grammar, Matcher, Tree, UserError

ALL = -1  # every bit set


class Rows:
    """Where the rows of a batch stand in the grammar: at the tokens that were committed, between any two calls."""

    def __init__(self, grammar: Grammar, batch: int, device: torch.device):
        self.grammar, self.device = grammar, device
        self.matchers: list[Matcher | None] = [None] * batch
        self.seconds = 0.0  # of the host, spent on masks

    def start(self, rows: Sequence[int]) -> Tensor:
        """New answers begin in `rows` [R] -> the masks of their first tokens [R, words]."""
        began = time.perf_counter()
        allow = self._blank(len(rows))
        for place, row in enumerate(rows):
            matcher = self.matchers[row] = self.grammar.matcher()
            matcher.fill(allow, place)
        return self._done(allow, began)

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        matcher = self.matchers[row]
        assert matcher is not None
        for token in tokens:
            if not matcher.accept(token):
                raise UserError(
                    f"token {token} was emitted, and the grammar forbids it there: the verifier takes tokens to which p gives "
                    "no probability, use another one"
                )

    def release(self, row: int) -> None:
        self.matchers[row] = None

    def look(self, tree: Tree) -> Callable[[], Tensor]:
        """To be called before the target's pass is launched, and what it returns after that: on a GPU the tree is copied, and
        the masks are filled, while the pass runs. -> the masks of all nodes [B, N, words]."""
        packed = torch.stack([tree.tokens, *links(tree.parent, tree.valid)])
        if packed.device.type != "cuda":
            return lambda: self._trees(packed)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def fill() -> Tensor:
            copied.synchronize()
            return self._trees(host)

        return fill

    def _trees(self, packed: Tensor) -> Tensor:
        began = time.perf_counter()
        tokens, first, sibling = packed.tolist()
        allow = self._blank(len(tokens), len(tokens[0]))
        for row, matcher in enumerate(self.matchers):
            if matcher is not None:
                fill_tree(self.grammar, matcher, tokens[row], first[row], sibling[row], allow[row])
        return self._done(allow, began)

    def frontier(self, frontier: Frontier) -> Tensor:
        """The masks of nodes that are asked about [B, W, words]: nothing where the path to one is off the grammar, or ended."""
        paths = frontier.path.tolist()
        began = time.perf_counter()
        allow = self._blank(len(paths), len(paths[0]))
        for row, matcher in enumerate(self.matchers):
            if matcher is None:
                continue
            walk = Walk(matcher)
            for node, path in enumerate(paths[row]):
                if walk.to([token for token in path if token >= 0]) and not matcher.terminated:
                    matcher.fill(allow[row], node)
                else:
                    allow[row, node] = 0
            walk.to([])
        return self._done(allow, began)

    def _blank(self, *shape: int) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.full((*shape, words_of(self.grammar.vocab_size)), ALL, dtype=torch.int32, pin_memory=pinned)

    def _done(self, allow: Tensor, began: float) -> Tensor:
        self.seconds += time.perf_counter() - began
        return allow.to(self.device, non_blocking=True)


def fill_tree(
    grammar: Grammar, matcher: Matcher, tokens: list[int], first: list[int], sibling: list[int], allow: Tensor
) -> None:
    """Fill `allow` [N, words] for the nodes of one tree that the grammar lets come about; the matcher ends where it stood.

    A node is tested against its parent's mask. Behind an accepted EOS only EOS is allowed, and nothing is looked at. What
    lies behind a node off the grammar is left as it is: p never comes there.
    """
    bits = allow.numpy()
    matcher.fill(allow, 0)
    above, node = [0], first[0]  # the accepted nodes from the root down, and the one to be tried
    while True:
        if node < 0:  # no more siblings: go up, and on beside the node that was accepted last
            if len(above) == 1:
                return
            matcher.rollback(1)
            node = sibling[above.pop()]
            continue
        token = tokens[node]
        if bits[above[-1], token >> 5] >> (token & 31) & 1 and matcher.accept(token):
            if not matcher.terminated:
                matcher.fill(allow, node)
                above.append(node)
                node = first[node]
                continue
            allow[node] = end_of_text(grammar)
            matcher.rollback(1)
        node = sibling[node]


class Walk:
    """A matcher that goes to one path after another, by way of what they share."""

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.path: list[int] = []

    def to(self, path: Sequence[int]) -> bool:
        """False where the grammar does not allow the path: it then stands at the last token that it does."""
        pairs = enumerate(zip(self.path, path))
        common = next((i for i, (a, b) in pairs if a != b), min(len(self.path), len(path)))
        self.matcher.rollback(len(self.path) - common)
        del self.path[common:]
        for token in path[common:]:
            if not self.matcher.accept(token):
                return False
            self.path.append(token)
        return True


def end_of_text(grammar: Grammar) -> Tensor:
    """[words]"""
    words = torch.zeros(words_of(grammar.vocab_size), dtype=torch.int64)
    for token in grammar.eos:
        words[token >> 5] |= 1 << (token & 31)
    return words.to(torch.int32)


def masks(grammar: Grammar | None, ids: Sequence[int]) -> Tensor | None:
    """Which tokens the grammar allows at each place of an answer [len(ids), words], for the checks; all from the first token
    on that it forbids. None without a grammar."""
    if grammar is None:
        return None
    allow = torch.full((len(ids), words_of(grammar.vocab_size)), ALL, dtype=torch.int32)
    matcher = grammar.matcher()
    for place, token in enumerate(ids):
        if matcher.terminated:
            break
        matcher.fill(allow, place)
        if not matcher.accept(token):
            break
    return allow.to(grammar.device)


def standing(grammar: Grammar, ids: Sequence[int]) -> str:
    """Of a whole answer, by a matcher of its own: complete (it ends where the grammar lets it), cut (by a budget, or a stop
    string), or off (it has a token that the grammar forbids)."""
    matcher = grammar.matcher()
    if not all(matcher.accept(token) for token in ids):
        return "off"
    return "complete" if matcher.terminated else "cut"
