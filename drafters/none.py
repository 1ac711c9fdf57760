"""Propose nothing: plain decoding through the same loop."""

from __future__ import annotations

from specresearch.types import Ask, Drafter, Kept, Step, Target, Tree, TreePolicy


class NoDrafter(Drafter):
    law = "point"
    growth = "static"

    def __init__(self, target: Target):
        pass

    def propose(self, step: Step, policy: TreePolicy, ask: Ask) -> Tree:
        return Tree.of_root(step)

    def kept(self) -> Kept:
        return Kept()
