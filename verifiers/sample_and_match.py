"""Draw from p, walk to the child that equals the draw: lossless for any tree, whatever its children were chosen by.

The token emitted at a mismatch is that same draw, so every token is the target's own sample and the drafts decide only how
many come in one pass (the rule of llama.cpp, and of transformers' prompt lookup). A node is accepted with probability
p(its children): as often as under the point-mass rule for the same tree, but with draws from q less often than by rejection,
sum p q against sum min(p, q) on a chain.
"""

from __future__ import annotations

from specresearch.kernels import verify
from specresearch.types import Probs, Rng, Tree, Verdict, Verifier


class SampleAndMatch(Verifier):
    replay = "given_tree"

    def verify(self, tree: Tree, p: Probs, rng: Rng) -> Verdict:
        return verify.sample_and_match(tree, p, rng)
