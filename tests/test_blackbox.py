"""The statistics of emitted tokens on a synthetic pool: nominal size, power against each kind of fault, and resolution."""

import json
import math
from statistics import NormalDist

import pytest
import torch

from specresearch.lossless import eprocess
from specresearch.lossless.blackbox import BlackBox, plan
from specresearch.lossless.scores import NAMES, Scored, battery, mid_pit, score, surprisal, top
from specresearch.types import UserError

PLACES, V = 60, 40


def pool(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Peaked laws p and a draft q that agrees with them roughly, [PLACES, V] each."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(PLACES, V, generator=generator, dtype=torch.float64)
    other = logits + 1.2 * torch.randn(PLACES, V, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), other.softmax(-1)


def residual(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum(-1, keepdim=True)


def heat(law, temperature):
    return law.log().div(temperature).softmax(-1)


def chain_law(p, q, accept, rest):
    """Law of a chain's first token: drafts by q, accepted with `accept`, else drawn from `rest`."""
    taken = q * accept.clamp(max=1)
    return taken + (1 - taken.sum(-1, keepdim=True)) * rest


def faults(p, q):
    greedy = torch.nn.functional.one_hot(q.argmax(-1), V).double()
    cool = heat(q, 0.7)
    return {
        "sqrt": chain_law(p, q, (p / q).sqrt(), residual(p, q)),
        "resample": chain_law(p, q, p / q, p),
        "argmax_draft": chain_law(p, greedy, p / q, residual(p, q)),
        "cool_draft": chain_law(p, cool, p / q, residual(p, q)),
        "cool_target": heat(p, 0.7),
    }


def draws(law, n: int, seed: int):
    """-> places [n], tokens [n] from `law` at these places"""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(PLACES, (n,), generator=generator)
    return places, torch.multinomial(law[places], 1, generator=generator)[:, 0]


def judged(law, n: int, seed: int, p, q, **options) -> BlackBox:
    box = BlackBox(**options)
    places, tokens = draws(law, n, seed)
    for at in range(0, n, 100):
        here = places[at : at + 100]
        box.update(p[here], q[here], tokens[at : at + 100], ["all"] * len(here))
    return box


def test_a_chain_with_the_right_rule_has_the_law_p():
    p, q = pool()
    assert (chain_law(p, q, p / q, residual(p, q)) - p).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_means_and_variances_are_exact(dtype):
    """Over all tokens, weighted by p, an excess must have mean 0 and the variance that is stated; ties included."""
    p, q = (x[:4].to(dtype) for x in pool())
    p[0, 3] = p[0, 7]
    p[1, 5] = 0.0
    p = p / p.sum(-1, keepdim=True)
    every = torch.arange(V)
    for row in range(4):
        wide = p[row].expand(V, -1)
        found = score(wide, q[row].expand(V, -1), every)
        parts = [(found.excess, found.variance)]
        parts += [f(wide, every[:, None]) for f in (surprisal, top, mid_pit)]
        for excess, variance in parts:
            weight = p[row].double()[:, None]
            exact = 1e-12 if dtype == torch.float64 else 1e-6
            assert (weight * excess).sum(0).abs().max() < exact
            assert ((weight * excess.square()).sum(0) - variance[0]).abs().max() < exact
        spread = found.excess.amax(0) - found.excess.amin(0)
        assert (spread <= found.range[0] + 1e-6).all()
        assert found.impossible.sum() == (row == 1)


def test_many_tokens_at_one_place_score_as_each_alone():
    p, q = (x[:3].float() for x in pool())
    p[0, 3] = p[0, 7]
    every = torch.arange(V).expand(3, -1)
    excess, variance, ranges, impossible, witness = battery(p, q, every)
    for i in range(3):
        alone = score(p[i].expand(V, -1), q[i].expand(V, -1), every[0])
        assert (excess[i] - alone.excess).abs().max() < 1e-6
        assert (variance[i] - alone.variance[0]).abs().max() < 1e-6
        assert (ranges[i] - alone.range[0]).abs().max() < 1e-6
        assert not impossible.any() and witness[i] == pytest.approx(float(alone.witness[0]))


def replicates(law, p, q, count: int, n: int, tolerance: float = 0.0, seed: int = 0):
    """-> log wealth along each of `count` paths [count, n], z of each score at the end [count, S]"""
    table = [score(p[i].expand(V, -1), q[i].expand(V, -1), torch.arange(V)) for i in range(PLACES)]
    every = [torch.stack([getattr(t, name) for t in table]) for name in ("excess", "variance", "range", "impossible")]
    wealth, z = [], []
    for block in range(0, count, 100):
        places, tokens = draws(law, 100 * n, seed * 1000 + block)
        excess, variance, ranges, impossible = (x[places, tokens] for x in every)
        logs = eprocess.growth(excess, ranges, impossible, tolerance).view(100, n, -1)
        wealth.append(eprocess.wealth(logs.cumsum(1)))
        z.append(excess.view(100, n, -1).sum(1) / variance.view(100, n, -1).sum(1).sqrt())
    return torch.cat(wealth), torch.cat(z)


def test_false_alarms_are_at_most_nominal():
    p, q = pool()
    wealth, z = replicates(p, p, q, count=1000, n=150)
    alpha = 0.02
    alarms = int((wealth.amax(1) >= math.log(1 / alpha)).sum())
    assert alarms <= 20  # Ville's bound in expectation; an e-process stays well below it
    bar = NormalDist().inv_cdf(1 - alpha / len(NAMES) / 2)
    assert (z.abs().amax(1) > bar).sum() <= 20 + 3 * 4.5
    assert (z.mean(0).abs() < 4 / math.sqrt(1000)).all()
    assert ((z.std(0) - 1).abs() < 0.1).all()


def test_the_nominal_size_test_can_fail():
    """A law that is off by little more than rounding must already show in the z of many replicates."""
    p, q = pool()
    _, z = replicates(0.97 * p + 0.03 * q, p, q, count=1000, n=150)
    assert (z.mean(0).abs() > 4 / math.sqrt(1000)).any()


@pytest.mark.parametrize("name", ["sqrt", "resample", "argmax_draft", "cool_draft", "cool_target"])
def test_faults_are_seen(name):
    p, q = pool()
    law = faults(p, q)[name]
    tv = float((law - p).abs().sum(-1).mean() / 2)
    assert tv > 0.01
    box = judged(law, 3 * plan(tv), 1, p, q)  # the plan is for a shift on {q > p}, none of these is that alone
    assert box.verdict == "violation", (tv, box.report())
    assert box.stopped_at is not None and box.stopped_at <= box.tokens
    assert box.report().p_value < 1e-3


def test_a_right_engine_is_consistent_and_its_intervals_hold():
    p, q = pool()
    report = judged(p, 4000, 2, p, q).report()
    assert report.verdict == "consistent" and report.p_value > 1e-3 and report.suspects == []
    assert all(bias.low < 0 < bias.high for bias in report.scores.values())
    json.dumps(report.as_dict())


def test_resolution_is_reached():
    """A bias of exactly the stated size on {q > p} is seen in at least about 0.9 of all paths: not less, not far more."""
    p, q = pool()
    n = 500
    above = q > p
    mass = (p * above).sum(-1, keepdim=True)
    variance = float((mass * (1 - mass)).mean())
    small = eprocess.resolution(variance, n, len(NAMES), 1e-3, 0.9)
    assert BlackBox().report().resolution is None
    assert judged(p, n, 3, p, q).report().resolution == pytest.approx(small, rel=0.1)

    def shifted(bias):  # more where there is more room; `bias` on average
        more = mass + bias * mass * (1 - mass) / variance
        return torch.where(above, p / mass * more, p / (1 - mass) * (1 - more))

    wealth, _ = replicates(shifted(small), p, q, count=200, n=n)
    assert 0.85 <= (wealth.amax(1) >= math.log(1000)).double().mean() <= 1
    wealth, _ = replicates(shifted(small / 3), p, q, count=100, n=n)
    assert (wealth.amax(1) >= math.log(1000)).double().mean() < 0.3


def test_plan_grows_as_the_inverse_square():
    assert plan(0.01) == pytest.approx(100 * plan(0.1), rel=0.1)
    assert plan(0.01, power=0.5) < plan(0.01) < plan(0.01, alpha=1e-6)
    assert plan(0.01, witness=0.05) < plan(0.01)
    for wrong in ({"tv": 0}, {"tv": 0.1, "alpha": 1}, {"tv": 0.1, "power": 1.5}):
        with pytest.raises(UserError, match=r"plan\."):
            plan(**wrong)


def test_tolerance_covers_every_law_within_it():
    p, q = pool()
    near = chain_law(p, q, (p / q).pow(0.9), residual(p, q))
    tv = float((near - p).abs().sum(-1).max() / 2)
    assert 0.005 < tv < 0.08
    wealth, _ = replicates(near, p, q, count=100, n=1000, tolerance=tv)
    assert (wealth.amax(1) >= math.log(100)).sum() <= 2
    assert judged(faults(p, q)["sqrt"], 2000, 1, p, q, tolerance=0.01).verdict == "violation"
    strict = judged(near, 40_000, 1, p, q)
    assert strict.verdict == "violation"
    tolerant = judged(near, 40_000, 1, p, q, tolerance=tv)
    assert tolerant.verdict == "consistent"
    assert tolerant.report().p_value > strict.report().p_value
    assert tolerant.report().resolution > strict.report().resolution


def test_a_token_that_the_target_cannot_emit_is_a_proof():
    p, q = pool()
    p = torch.where(p < 0.01, 0.0, p)
    p = p / p.sum(-1, keepdim=True)
    box = judged(p, 100, 4, p, q)
    assert box.verdict == "consistent"
    box.update(p[:1], q[:1], p[:1].argmin(1), ["bad"])
    assert box.verdict == "violation" and box.impossible == 1
    assert box.report().p_value == 0
    tolerant = BlackBox(tolerance=0.01)
    tolerant.update(p[:1], q[:1], p[:1].argmin(1), ["bad"])
    assert tolerant.verdict == "consistent"


def halves(n: int = 600):
    p, q = pool()
    places, tokens = draws(faults(p, q)["sqrt"], n, 5)
    names = [i // 20 for i in range(n)]
    return [(p[places[s]], q[places[s]], tokens[s], names[s]) for s in (slice(0, 310), slice(310, n))]


def test_merged_boxes_hold_what_one_box_would():
    first, second, whole = BlackBox(), BlackBox(), BlackBox()
    for box, part in zip((first, second), halves()):
        box.update(*part)
        whole.update(*part)
    first.merge(second)
    a, b = first.report(), whole.report()
    assert a.log10_e == pytest.approx(b.log10_e)
    assert a.log10_e_sup <= b.log10_e_sup + 1e-9
    assert a.scores["ratio"].z == pytest.approx(b.scores["ratio"].z)
    assert (a.tokens, a.verdict, a.p_value) == (b.tokens, b.verdict, pytest.approx(b.p_value))
    assert first.prompts.keys() == whole.prompts.keys()
    assert all((first.prompts[k] - whole.prompts[k]).abs().max() < 1e-9 for k in first.prompts)
    with pytest.raises(UserError):
        first.merge(BlackBox(alpha=0.5))


def test_a_box_goes_on_from_its_state():
    one, two = halves()
    whole = BlackBox()
    whole.update(*one)
    again = BlackBox().load(json.loads(json.dumps(whole.state())))
    for box in (whole, again):
        box.update(*two)
    assert again.report() == whole.report()
    assert again.curve == whole.curve
    assert again.curve[-1] == (600, pytest.approx(whole.report().log10_e))


def test_ebh_names_the_faulty_prompts():
    p, q = pool()
    box = BlackBox()
    for prompt in range(30):
        law = faults(p, q)["argmax_draft"] if prompt in (3, 17) else p
        places, tokens = draws(law, 300, 100 + prompt)
        box.update(p[places], q[places], tokens, [f"prompt {prompt}"] * 300)
    assert sorted(box.suspects()) == ["prompt 17", "prompt 3"]
    clean = BlackBox()
    for prompt in range(30):
        places, tokens = draws(p, 300, 200 + prompt)
        clean.update(p[places], q[places], tokens, [prompt] * 300)
    assert clean.suspects() == []


def test_bad_input_is_said():
    p, q = pool()
    with pytest.raises(UserError, match="vocabulary"):
        BlackBox().update(p[:1], q[:1], torch.tensor([V]), [0])
    with pytest.raises(UserError, match="NaN"):
        BlackBox().update(p[:1] * torch.nan, q[:1], torch.tensor([0]), [0])
    for wrong in ({"alpha": 0}, {"tolerance": 0.5}):
        with pytest.raises(UserError):
            BlackBox(**wrong)
    empty = BlackBox()
    empty.update(p[:0], q[:0], torch.zeros(0, dtype=torch.long), [])
    assert isinstance(score(p[:0], q[:0], torch.zeros(0, dtype=torch.long)), Scored)
    assert empty.report().tokens == 0 and empty.verdict == "consistent"
