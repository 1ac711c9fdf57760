"""The white box through the real loop: right runs pass, each planted fault is found by the claim that it breaks."""

import pytest
import torch
from helpers import decode, trees
from mutants import ResampleFromP, SquareRoot

from specresearch.drafters.ngram import NGram
from specresearch.drafters.small_lm import SmallLM
from specresearch.kernels.verify import walk
from specresearch.lossless.blackbox import BlackBox
from specresearch.lossless.reference import Reference, judge
from specresearch.lossless.whitebox import Log, WhiteBox, findings, verdict_of
from specresearch.models import tiny
from specresearch.rng import CounterRng
from specresearch.sampling import Sampler, TreeProbs
from specresearch.trees.growth import Growth
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Tree, Verdict, Verifier
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.target_only import TargetOnly

PROMPTS = [[3, 4, 5, 6, 7], [9], [1, 2] * 6, [100, 50, 20]]
WARM = Sampler(temperature=0.8)


@pytest.fixture(scope="module")
def model():
    return tiny.load(dtype="float32", device="cpu")


def run(model, policy=None, verifier=None, sampler=WARM, drafter=None, budget=120, batch=1, seed=0):
    log = Log()
    policy = policy or Chain(depth=3, temperature=0.8)
    common = {"drafter": drafter or SmallLM(model, layers=1), "policy": policy, "sampler": sampler}
    verifier = WhiteBox(verifier or Rejection(), log)
    turns = decode(model, PROMPTS, verifier=verifier, budget=budget, batch=batch, seed=seed, **common)
    return log, [turn.line() for turn in turns]


def found(log) -> dict[str, str]:
    return {f.name: f.verdict for f in findings(log)}


def broken(log) -> set[str]:
    return {name for name, verdict in found(log).items() if verdict == "violation"}


# -- right runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["topk", "iid", "without_replacement"])
@pytest.mark.parametrize("name", ["chain", "static", "best_first"])
def test_right_runs_pass(model, name, draw):
    policy = trees(0.8, draw)[name]
    log, lines = run(model, policy, budget=40, batch=3)
    assert not broken(log), findings(log)
    assert log.steps == sum(len(line["steps"]) for line in lines), "idle rows do not count"
    states = found(log)
    assert states["coins"] == states["residual"] == "consistent"
    assert (states["drafts"] == "consistent") == (policy.law != "point")
    assert verdict_of(findings(log)) == "consistent"


@pytest.mark.parametrize(
    "sampler", [Sampler(temperature=0.8, top_k=5, top_p=0.8, repetition_penalty=1.2), Sampler(temperature=0)]
)
@pytest.mark.parametrize("verifier", [Rejection(), TargetOnly(), Greedy()])
def test_truncated_and_greedy_runs_pass(model, sampler, verifier):
    if verifier.greedy_only and sampler.temperature:
        pytest.skip("refused by the loop's caller")
    log, _ = run(model, StaticTree(widths=[2, 2], temperature=sampler.temperature), verifier, sampler, budget=40)
    assert not broken(log), findings(log)


def test_nothing_drafted_is_not_exercised(model):
    log, _ = run(model, StaticTree(parents=[-1], temperature=0.8), budget=8)
    assert found(log) == dict.fromkeys(("drafts", "coins", "residual", "independence"), "not_checked") | {
        "bonus": "consistent"
    }


def test_an_unknown_rule_is_not_covered(model):
    class Mine(Rejection):
        replay = None

    log, _ = run(model, verifier=Mine(), budget=8)
    assert {f.kind for f in findings(log)} == {"not_covered"}
    assert verdict_of(findings(log)) == "not_checked"


def test_decisions_are_unchanged(model):
    policy = Chain(depth=3, temperature=0.8)
    plain = decode(model, PROMPTS, drafter=SmallLM(model, layers=1), policy=policy, sampler=WARM, budget=40)
    _, lines = run(model, policy, budget=40)
    assert [line["output_ids"] for line in lines] == [turn.output_ids for turn in plain]


# -- planted faults -----------------------------------------------------------------------------------------------------


class Mutant(Verifier):
    """A rule that claims to be rejection sampling."""

    replay = "by_law"

    def __init__(self, rule):
        self.rule = rule

    def verify(self, tree, p, rng):
        return walk(tree, self.rule(p, tree), rng)


class OtherCoins:
    """An rng whose coins are another's."""

    def __init__(self, rng, coin):
        self.pick, self.coin = rng.pick, coin

    def accept(self, coin_id, threshold):
        return self.coin(coin_id) < threshold.clamp(min=0)

    def uniforms(self, nodes):
        return None


class DraftsOwnCoin(Rejection):
    """The uniform that drew a chain's draft decides about it as well."""

    def verify(self, tree, p, rng):
        return super().verify(tree, p, OtherCoins(rng, lambda child: rng.uniform(1, (child - 1) * 4096)))


class RawBonus(Rejection):
    """After a whole accepted chain the token comes from the logits as they are: no temperature."""

    def verify(self, tree, p, rng):
        assert isinstance(p, TreeProbs)
        raw = TreeProbs(Sampler(temperature=1.6), p.logits, p.step, tree)

        def law(node):
            leaf = tree.depth.gather(1, node[:, None]) == tree.levels
            return torch.where(leaf, raw(node), p(node))

        return super().verify(tree, law, rng)


class ArgmaxDrafts(Chain):
    """Children are the draft's first choice, and its softmax is handed over as q."""

    def grow(self, step, ask):
        self.draw = "topk"
        return super().grow(step, ask)


class CoolDrafts(Chain):
    """Children are drawn at another temperature than that of the q that is claimed."""

    def grow(self, step, ask):
        draw = Growth._draw
        try:
            Growth._draw = lambda own, q, *rest: draw(own, (q**1.6) / (q**1.6).sum(-1, keepdim=True), *rest)
            return super().grow(step, ask)
        finally:
            Growth._draw = draw


class Reordered(StaticTree):
    """Siblings drawn without replacement, put into the order of their q: EAGLE-2's re-ranking of a sampled tree."""

    def grow(self, step, ask):
        tree = super().grow(step, ask)
        order = tree.score[:, 1:].argsort(dim=1, descending=True)
        tokens = torch.cat([tree.tokens[:, :1], tree.tokens[:, 1:].gather(1, order)], 1)
        score = torch.cat([tree.score[:, :1], tree.score[:, 1:].gather(1, order)], 1)
        return Tree(tokens, tree.parent, tree.depth, tree.valid, score, tree.law, tree.growth, tree.levels, tree.q)


def seen_by_black_box(model, lines, sampler=WARM) -> str:
    reference = Reference(model, sampler, draft=model.first_layers(1))  # what these runs draft with
    return judge(reference, lines, BlackBox()).verdict


CHAIN = Chain(depth=3, temperature=0.8)
# Policy, verifier, the claim that the white box finds broken (None: it is blind), whether 640 tokens are enough for the
# black box: its witness is the draft, and a bias that is small or lies elsewhere takes more.
FAULTS = {
    "sqrt": (CHAIN, Mutant(SquareRoot), "coins", True),
    "resample": (CHAIN, Mutant(ResampleFromP), "residual", True),
    "argmax drafts": (ArgmaxDrafts(depth=3, temperature=0.8), Rejection(), "drafts", True),
    "cool drafts": (CoolDrafts(depth=3, temperature=0.8), Rejection(), "drafts", True),
    "shared chance": (CHAIN, DraftsOwnCoin(), "independence", False),
    "raw bonus": (Chain(depth=1, temperature=0.8), RawBonus(), "bonus", True),
    "re-ranked": (Reordered(widths=[3], draw="without_replacement", temperature=0.8), Rejection(), "drafts", False),
    "wrong p": (CHAIN, Rejection(), None, True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught_by_the_layer_that_can_see_them(model, name):
    policy, verifier, claim, black = FAULTS[name]
    if claim is None:  # p is wrong throughout, so the log is consistent with it
        log = Log()
        inner = WhiteBox(Rejection(), log)

        class Outer(Verifier):
            def verify(self, tree, p, rng):
                return inner.verify(tree, TreeProbs(Sampler(temperature=1.4), p.logits, p.step, tree), rng)

        common = {"drafter": SmallLM(model, layers=1), "policy": policy, "sampler": WARM}
        turns = decode(model, PROMPTS, verifier=Outer(), budget=160, batch=4, **common)
        lines = [turn.line() for turn in turns]
        assert not broken(log)
    else:
        log, lines = run(model, policy, verifier, budget=160, batch=4)
        assert claim in broken(log), findings(log)
    if black:
        assert seen_by_black_box(model, lines) == "violation"


def test_a_point_mass_rule_that_takes_too_much_is_caught(model):
    log, _ = run(model, StaticTree(widths=[3, 1], temperature=0.8), TargetOnly(threshold_acc=0.5), budget=120)
    assert "coins" in broken(log)
    drafter = NGram(model, max_n=3, min_n=1, order="recency", backoff=0.001)
    log, _ = run(model, StaticTree(widths=[2, 2], temperature=0.8), Rejection(), drafter=drafter, budget=60)
    assert not broken(log)


def test_one_impossible_token_is_a_proof(model):
    class Once(Rejection):
        def verify(self, tree, p, rng):
            verdict = super().verify(tree, p, rng)
            law = p(torch.zeros(1, dtype=torch.long))
            return Verdict(verdict.path[:, :1], torch.ones(1, dtype=torch.long), law.argmin(1))

    log, _ = run(model, verifier=Once(), sampler=Sampler(temperature=0.8, top_k=4), budget=3)
    assert broken(log) & {"residual", "coins"}
    assert any(f.impossible for f in findings(log))


def test_rng_streams_of_the_loop_are_what_the_fault_uses():
    """`DraftsOwnCoin` must name the uniform that really drew the draft, or the fault would be none."""
    rng = CounterRng(torch.tensor([5]), torch.tensor([2]))
    law = torch.full((1, 1, 100), 0.01)
    drawn = int(rng.draw(law, 2))
    assert drawn == int(rng.uniform(1, 2 * 4096) * 100)
