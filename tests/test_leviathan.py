"""The checks of speculative sampling that everyone quotes (Leviathan et al. 2023, arXiv:2211.17192), at their edges, for the
shipped float32 and float64 code: p is the target's law, q the draft's."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import decode
from mutants import ResampleFromP, SquareRoot

from specresearch.drafters.none import NoDrafter
from specresearch.drafters.small_lm import SmallLM
from specresearch.kernels.tree import depths
from specresearch.kernels.verify import DrawnRule, Uniforms, walk
from specresearch.rng import CounterRng, row_key
from specresearch.sampling import Sampler
from specresearch.trees.static import Chain
from specresearch.types import Tree
from specresearch.verifiers.block import Block
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.spectr import SpecTr
from specresearch.verifiers.traversal import Traversal

DRAWN = [Rejection(), Block(), Traversal(), SpecTr()]  # rules that compare p with q; on one draft they are one
DTYPES = [torch.float32, torch.float64]
LAST = 1 - 2**-53  # the last float below 1
P, Q = [0.02, 0.5, 0.03, 0.05, 0.3, 0.06, 0.04, 0.0], [0.4, 0.01, 0.3, 0.1, 0.02, 0.15, 0.0, 0.02]  # badly mismatched


def name_of(x):
    return str(x) if isinstance(x, torch.dtype) else type(x).__name__


def drafts(tokens, q, parent=(-1, 0), law="iid"):
    """Trees whose nodes below the root hold `tokens` [B, N - 1], and whose root has the draft law q [B, V]."""
    nodes = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)
    up = torch.tensor(parent).expand(len(tokens), -1)
    laws = torch.zeros(len(tokens), len(parent), q.shape[-1], dtype=q.dtype)
    laws[:, 0] = q
    depth = depths(up)
    return Tree(nodes, up, depth, up > -2, depth.float(), law, "static", int(depth.max()), laws)


class Laws:
    def __init__(self, p):
        self.p = p

    def __call__(self, node):
        return self.p[torch.arange(len(node)), node]

    def all(self):
        return self.p


def judge(verifier, token, p, q, coin, final=0.5):
    """One draft per row: tokens [B], laws p, q [B, V], coins [B] -> the verdict"""
    rows = len(token)
    coins = torch.as_tensor(coin, dtype=torch.float64).expand(rows)
    rng = Uniforms(torch.stack([torch.full_like(coins, 0.5), coins], 1), torch.full_like(coins, final))
    return verifier.verify(drafts(token[:, None], q), Laws(torch.stack([p, p], 1)), rng)


def random_laws(count, vocab, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(2, count, vocab, generator=g, dtype=torch.float64).pow(3).softmax(-1).to(dtype)


# -- 1. p >= q always accepts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("verifier", DRAWN, ids=name_of)
def test_a_token_that_p_likes_as_much_as_q_is_always_accepted(verifier, dtype):
    p, q = random_laws(500, 7, dtype)
    p[::5] = q[::5]  # equality counts
    row, token = (p >= q).nonzero(as_tuple=True)
    for coin in (0.0, 0.5, 1 - 2**-24, LAST):
        assert (judge(verifier, token, p[row], q[row], coin).length == 2).all()


# -- 2. the threshold is p / q, strictly ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", DRAWN, ids=name_of)
def test_the_threshold_is_the_ratio(verifier):
    p, q = random_laws(500, 7, torch.float64)
    row, token = (p < q).nonzero(as_tuple=True)
    ratio = p[row, token] / q[row, token]
    assert (judge(verifier, token, p[row], q[row], ratio.nextafter(torch.zeros_like(ratio))).length == 2).all()
    assert (judge(verifier, token, p[row], q[row], ratio).length == 1).all()


@pytest.mark.parametrize("verifier", [*DRAWN, SampleAndMatch()], ids=name_of)
def test_what_cannot_be_is_never_accepted(verifier):
    """p(x) = 0 at a coin of 0; and a draft that q says it cannot make, where p/q would be infinite."""
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    verdict = judge(verifier, torch.tensor([0, 0]), p, q, 0.0, final=0.75)
    assert verdict.length.tolist() == [1, 1] and verdict.next_token[0] == 1


# -- 3. the residual -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_residual_is_a_law_and_has_nothing_where_q_is_above_p(dtype):
    p, q = random_laws(300, 9, dtype)
    p[::7] = q[::7]
    rule = DrawnRule(Laws(p[:, None]), drafts(torch.zeros(300, 1, dtype=torch.long), q))
    rows = torch.zeros(300, dtype=torch.long)
    rule.enter(rows, rows == 0)
    reject = Uniforms(
        torch.full((300, 2), math.inf, dtype=torch.float64), torch.zeros(300)
    )  # a coin that no chance reaches
    rule.accept(rows + 1, rows, rows == 0, reject)
    assert torch.allclose(rule.residual.sum(1), torch.ones((), dtype=dtype), atol=1e-6)
    apart = (p != q).any(1)
    assert (rule.residual[apart][(q >= p)[apart]] == 0).all()
    wanted = (p - q).clamp(min=0)[apart]
    assert torch.allclose(rule.residual[apart], wanted / wanted.sum(1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("verifier", DRAWN, ids=name_of)
def test_p_equal_to_q_never_comes_to_its_empty_residual(verifier, dtype):
    q = random_laws(200, 9, dtype)[0]
    token = torch.arange(200) % 9
    assert (judge(verifier, token, q.clone(), q, LAST).length == 2).all()
    forced = judge(verifier, token, q.clone(), q, 2.0)  # even if it did, a token of p would come, and no NaN
    assert (forced.next_token >= 0).all()


# -- 4. all k accepted: k + 1 tokens in one pass -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin(target, tmp_path_factory):
    """A drafter that is the target itself, so that p = q."""
    folder = tmp_path_factory.mktemp("twin")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return SmallLM(target, id=str(folder), dtype="float64")


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("verifier", DRAWN, ids=name_of)
def test_all_accepted_gives_one_more_in_one_target_pass(target, twin, verifier, k, monkeypatch):
    passes = []
    forward = type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda *a: passes.append(1) or forward(*a))
    sampler = Sampler(temperature=0.8, repetition_penalty=1.2)
    how = {"verifier": verifier, "sampler": sampler, "budget": 1 + 3 * (k + 1)}
    policy = Chain(depth=k, temperature=0.8)
    ids = target.chat([{"role": "user", "content": "abc"}])
    (turn,) = decode(target, [ids], drafter=twin, policy=policy, **how)
    assert [step["emitted"] for step in turn.steps] == [k + 1] * 3 and len(passes) == 3
    assert all(len(step["path"]) == k + 1 for step in turn.steps)


@pytest.mark.parametrize("verifier", [*DRAWN, SampleAndMatch()], ids=name_of)
def test_nothing_drafted_gives_one_token_a_pass(target, verifier):
    """As in the plain decoding of every run, which goes through the run's own verifier."""
    ids = target.chat([{"role": "user", "content": "abc"}])
    how = {"verifier": verifier, "sampler": Sampler(temperature=1.0), "budget": 6}
    (turn,) = decode(target, [ids], drafter=NoDrafter(target), policy=Chain(depth=3, temperature=1), **how)
    assert [step["emitted"] for step in turn.steps] == [1] * 5


@pytest.mark.parametrize("verifier", DRAWN, ids=name_of)
def test_the_token_after_all_drafts_follows_p_there(verifier):
    """Not p at the root, and not a residual."""
    q = torch.tensor([[0.5, 0.5, 0.0]])
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]])
    for final, token in ((0.0, 1), (0.2499, 1), (0.2501, 2), (LAST, 2)):
        rng = Uniforms(torch.full((1, 2), LAST, dtype=torch.float64), torch.tensor([final], dtype=torch.float64))
        verdict = verifier.verify(drafts(torch.tensor([[1]]), q), Laws(p), rng)
        assert (int(verdict.length), int(verdict.next_token)) == (2, token)


# -- 5. 50,000 draws -----------------------------------------------------------------------------------------------------

DRAWS = 50_000


def first_tokens(verify, children=1):
    """The first token of each of 50,000 steps, by the run's own source of chance."""
    p, q = (torch.tensor(law).expand(DRAWS, -1) for law in (P, Q))
    key = torch.tensor([row_key(0, i, 0) for i in range(DRAWS)])
    rng = CounterRng(key, torch.zeros_like(key))
    tokens = rng.draw(q[:, None].expand(-1, children, -1), 0)
    tree = drafts(tokens, q, (-1, *[0] * children))
    verdict = verify(tree, Laws(p[:, None].expand(-1, children + 1, -1)), rng)
    node = verdict.path[:, 1].clamp(min=0)
    return torch.where(verdict.length > 1, tree.tokens.gather(1, node[:, None])[:, 0], verdict.next_token)


def p_value(tokens):
    """Pearson's chi-square against P; a token that P excludes is a proof."""
    count = torch.bincount(tokens, minlength=len(P)).double()
    wanted = torch.tensor(P, dtype=torch.float64) * DRAWS
    if (count[wanted == 0] > 0).any():
        return 0.0
    real = wanted > 0
    statistic = ((count - wanted)[real] ** 2 / wanted[real]).sum()
    return float(torch.special.gammaincc(torch.tensor((int(real.sum()) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("verifier", [Rejection(), SpecTr(), SampleAndMatch()], ids=name_of)
def test_fifty_thousand_draws_follow_p(verifier, children):
    assert p_value(first_tokens(verifier.verify, children)) > 1e-3


@pytest.mark.parametrize("verifier", [Block(), Traversal()], ids=name_of)
def test_fifty_thousand_draws_of_the_rules_for_branches_follow_p(verifier):
    assert p_value(first_tokens(verifier.verify)) > 1e-3


@pytest.mark.parametrize("fault", [SquareRoot, ResampleFromP])
def test_fifty_thousand_draws_of_a_faulty_rule_do_not(fault):
    assert p_value(first_tokens(lambda tree, p, rng: walk(tree, fault(p, tree), rng))) < 1e-9


def test_the_chi_square_itself():
    """On draws from P it is not suspicious; on draws from a law at TV 0.02 it is."""
    draw = lambda law: torch.multinomial(torch.tensor(law), DRAWS, True, generator=torch.Generator().manual_seed(3))  # noqa: E731
    other = [P[0] + 0.02, P[1] - 0.02, *P[2:]]
    assert p_value(draw(P)) > 1e-3 and p_value(draw(other)) < 1e-6
    assert math.isclose(float(torch.special.gammaincc(torch.tensor(3.5), torch.tensor(14.067 / 2))), 0.05, abs_tol=1e-4)


# -- other edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", [*DRAWN, SampleAndMatch()], ids=name_of)
def test_a_vocabulary_of_one(verifier):
    one = torch.ones(1, 1)
    verdict = judge(verifier, torch.tensor([0]), one, one, LAST)
    assert (int(verdict.length), int(verdict.next_token)) == (2, 0)


@pytest.mark.parametrize("verifier", [*DRAWN, SampleAndMatch()], ids=name_of)
def test_one_hot_p_is_greedy(verifier):
    p, q = torch.tensor([[0.0, 1, 0]] * 2), torch.tensor([[0.2, 0.3, 0.5]] * 2)
    for coin in (0.0, 0.4, LAST):
        verdict = judge(verifier, torch.tensor([1, 2]), p, q, coin)
        assert verdict.length.tolist() == [2, 1] and verdict.next_token.tolist() == [1, 1]


@pytest.mark.parametrize("verifier", [*DRAWN, SampleAndMatch()], ids=name_of)
def test_a_law_that_is_none_is_reported(verifier):
    """NaN in p: no draft is taken, and the next token is -1, which the loop refuses."""
    p, q = torch.full((1, 3), math.nan), torch.tensor([[0.2, 0.3, 0.5]])
    verdict = judge(verifier, torch.tensor([1]), p, q, 0.0)
    assert (int(verdict.length), int(verdict.next_token)) == (1, -1)


@pytest.mark.parametrize("verifier", DRAWN[1:], ids=name_of)
def test_drafts_without_their_law_are_an_error(verifier):
    tree = replace(drafts(torch.tensor([[0]]), torch.ones(1, 1)), q=None)
    with pytest.raises(ValueError, match="without the q"):
        verifier.verify(tree, Laws(torch.ones(1, 2, 1)), Uniforms(torch.zeros(1, 2), torch.zeros(1)))


def test_all_children_rejected_draws_from_what_is_left():
    """Three iid siblings, one of them repeated, that p does not have."""
    p, q = torch.tensor([[0.0, 0.0, 0.25, 0.75]]), torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    tree = drafts(torch.tensor([[0, 0, 1]]), q, (-1, 0, 0, 0))
    for law in ("iid", "point"):
        rng = Uniforms(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64))
        verdict = Rejection().verify(replace(tree, law=law), Laws(p[:, None].expand(-1, 4, -1)), rng)
        assert (int(verdict.length), int(verdict.next_token)) == (1, 3)
