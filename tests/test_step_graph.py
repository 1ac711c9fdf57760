"""Whole steps recorded once and replayed: same answers for every drafter, tree and rule. As in test_graphs.py, a stand-in for
the recording repeats the same operators on the same buffers, and the work may ask the host for nothing."""

import pytest
import torch
from conftest import PROMPTS
from helpers import decode, trees
from test_graphs import Recorded, Recorder, Watch
from tiny_heads import eagle_head, medusa_heads

from specresearch import recording
from specresearch.decode import Decoder, Job, Parts
from specresearch.drafters.eagle import Eagle
from specresearch.drafters.medusa import Medusa
from specresearch.drafters.ngram import NGram
from specresearch.drafters.none import NoDrafter
from specresearch.drafters.simulated import Simulated
from specresearch.drafters.small_lm import SmallLM
from specresearch.kernels import backend
from specresearch.lossless.whitebox import Log, WhiteBox
from specresearch.models import tiny
from specresearch.models.checkpoints import save_head
from specresearch.sampling import Sampler
from specresearch.step_graph import State, StepGraphs
from specresearch.trees.static import Chain
from specresearch.verifiers.block import Block
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal

BUDGET = 26


@pytest.fixture(scope="module")
def deep():
    own = tiny.load(dtype="float64", device="cpu", layers=4)
    return Recorded(own.model, own.tokenizer, own.name)


@pytest.fixture(scope="module")
def prompts(deep):
    return [deep.chat([{"role": "user", "content": text}]) for text in PROMPTS[:3]]


@pytest.fixture(scope="module")
def drafters(deep, prompts, tmp_path_factory):
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("eagle1", "eagle3", "medusa")}
    save_head(eagle_head(version=1), folders["eagle1"])
    save_head(eagle_head(), folders["eagle3"])
    save_head(medusa_heads(), folders["medusa"])
    oracle = Simulated(deep, length=2.6, method="match_expected")
    for turn, prompt in zip(
        decode(deep, prompts, drafter=NoDrafter(deep), policy=trees()["chain"], budget=BUDGET), prompts
    ):
        oracle.foretell(prompt, turn.output_ids)
    return {
        "none": NoDrafter(deep),
        "eagle1": Eagle(deep, ckpt=folders["eagle1"]),
        "eagle3": Eagle(deep, ckpt=folders["eagle3"]),
        "medusa": Medusa(deep, ckpt=folders["medusa"]),
        "small_lm": SmallLM(deep, layers=3),
        "oracle": oracle,
    }


MADE = []


class Steps(StepGraphs):
    """As on a GPU: steps are recorded, by the stand-in."""

    def __init__(self, *given):
        super().__init__(*given)
        self.how, self.calls = Recorder(), 0
        MADE.append(self)

    def __call__(self, extent):
        self.calls += 1
        outputs = super().__call__(extent)
        marks = [part for part, _ in self.clock.marks]
        assert marks == ["other", "draft", "target", "verify", "commit", "draft", "other"], (
            "times of a played step, too"
        )
        return outputs


@pytest.fixture
def recorded(monkeypatch):
    """Decodes by recordings, of several lengths -> answers and the loop's recordings"""
    MADE.clear()

    def run(*given, **keys):
        with monkeypatch.context() as patch:
            patch.setattr("specresearch.decode.StepGraphs", Steps)
            patch.setattr("specresearch.step_graph.LEAST", 32)
            turns = decode(*given, **keys)
        return turns, MADE[-1]

    return run


def told(turns):
    """All that a trace holds, but for times."""
    return [[{k: v for k, v in step.items() if k != "ms"} for step in turn.steps] for turn in turns]


CASES = [
    *(
        (name, "dynamic", None, Rejection(), 0.0)
        for name in ("none", "eagle1", "eagle3", "medusa", "small_lm", "oracle")
    ),
    *(("small_lm", tree, None, Greedy(), 0.0) for tree in ("chain", "static", "best_first", "optimal")),
    *((name, "chain", "iid", Rejection(), 1.0) for name in ("eagle3", "medusa", "small_lm")),
    ("small_lm", "static", "without_replacement", Traversal(), 1.0),
    ("small_lm", "static", "iid", Rejection(), 1.0),
    ("small_lm", "chain", "iid", Block(), 1.0),
    ("eagle3", "dynamic", None, SampleAndMatch(), 1.0),
    ("small_lm", "dynamic", None, TargetOnly(), 1.0),
]


@pytest.mark.parametrize(
    ("name", "tree", "draw", "rule", "heat", "batch"), [(*c, 1 + i % 2) for i, c in enumerate(CASES)]
)
def test_a_recorded_step_is_the_step(deep, prompts, drafters, recorded, name, tree, draw, rule, heat, batch):
    given = {
        "drafter": drafters[name],
        "policy": trees(heat, draw)[tree],
        "verifier": rule,
        "batch": batch,
        "budget": BUDGET,
    }
    given |= {"sampler": Sampler(temperature=heat, top_p=0.95, repetition_penalty=1.1)}
    plain = decode(deep, prompts, **given)
    turns, steps = recorded(deep, prompts, **given)
    assert [t.output_ids for t in turns] == [t.output_ids for t in plain] and told(turns) == told(plain)
    assert len(steps.known) > 1, "answers outgrew the first recording"
    assert steps.played > steps.calls / 2


class Asks(Watch):
    """What waits for the device, and lists that the host would send it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "lift_fresh" in str(func) and args[0].dim():
            self.found.append(f"a list of {args[0].numel()} numbers")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("name", "tree", "draw", "rule", "heat", "kernels"),
    [(*case, ("torch", "triton")[number % 2]) for number, case in enumerate(CASES)],
)
def test_a_step_asks_the_host_nothing(
    deep, prompts, drafters, recorded, monkeypatch, kernels, name, tree, draw, rule, heat
):
    asks = Asks()

    def how(work, rewind):
        passes = deep.recorder.replayed
        with asks:
            work()
        assert deep.recorder.replayed == passes, "a recording holds no other one"
        raise RuntimeError("seen enough")

    monkeypatch.setattr("test_step_graph.Recorder", lambda: how)
    backend.use(name=kernels)
    sampler = Sampler(temperature=heat, repetition_penalty=1.1, logit_bias={5: 1.0}, top_k=20)
    with pytest.warns(UserWarning, match="cannot be recorded as CUDA graphs: seen enough"):
        _, steps = recorded(
            deep,
            prompts[:1],
            drafter=drafters[name],
            policy=trees(heat, draw)[tree],
            verifier=rule,
            sampler=sampler,
            budget=9,
        )
    assert asks.found == []
    assert steps.how is None and steps.played == 0


def test_the_watch_sees_what_it_looks_for():
    with Asks() as asks:
        torch.zeros(3).max().item()
        torch.zeros(3)[[0, 1]]
        torch.zeros(3)[0] = 1  # a number of the host's is no question
    assert len(asks.found) == 2


def test_where_recording_fails_the_steps_go_on(deep, prompts, drafters, recorded, monkeypatch):
    """Nothing is left of the attempts."""

    def how(work, rewind):
        length = MADE[-1].holders[0].length
        before = length.clone()
        work()
        assert not torch.equal(length, before)
        rewind()
        assert torch.equal(length, before), "the next one goes from where the first did"
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    given = {"drafter": drafters["eagle3"], "policy": trees()["dynamic"], "batch": 2, "budget": BUDGET}
    plain = decode(deep, prompts, **given)
    monkeypatch.setattr("test_step_graph.Recorder", lambda: how)
    with pytest.warns(UserWarning, match="operation not permitted"):
        turns, _ = recorded(deep, prompts, **given)
    assert told(turns) == told(plain)


class Counting(Eagle):
    """Keeps a number on the host that each step changes."""

    def commit(self, step, tree, verdict, features):
        super().commit(step, tree, verdict, features)
        self.steps = getattr(self, "steps", 0) + 1


class Watching(Chain):
    """Takes one shape always, and might not."""

    def observe(self, verdict, seconds):
        pass


def test_what_needs_the_host_is_not_recorded(deep, prompts, drafters, recorded):
    folder = drafters["eagle3"]
    counting = Counting.__new__(Counting)
    counting.__dict__.update(vars(folder))
    for drafter, policy, verifier in (
        (NGram(deep, max_n=3, min_n=1, order="recency", backoff=0.001), trees()["chain"], Rejection()),
        (drafters["eagle3"], trees()["auto"], Rejection()),
        (drafters["eagle3"], Watching(depth=4, temperature=0), Rejection()),
        (drafters["eagle3"], trees()["chain"], WhiteBox(Rejection(), Log())),
        (counting, trees()["chain"], Rejection()),
        (drafters["eagle3"], recording.Recorder(trees()["dynamic"]), Rejection()),
    ):
        given = {"drafter": drafter, "policy": policy, "verifier": verifier, "budget": 16}
        turns, steps = recorded(deep, prompts[:2], **given)
        assert steps.calls > 20 and steps.played == 0
        assert [t.output_ids for t in turns] == [t.output_ids for t in decode(deep, prompts[:2], **given)]


def test_tensors_may_trade_places():
    class Pair:
        pass

    pair = Pair()
    pair.a, pair.b = one, two = torch.tensor([1]), torch.tensor([2])
    state = State((pair,))
    pair.a, pair.b = pair.b, pair.a
    state.settle()
    assert pair.a is one and pair.b is two and (int(one), int(two)) == (2, 1)


def test_decoders_may_share_a_drafter_and_caches_may_be_made_anew(deep, prompts, drafters, monkeypatch):
    monkeypatch.setattr("specresearch.decode.StepGraphs", Steps)
    drafter, policies = drafters["small_lm"], (trees()["dynamic"], trees()["chain"])
    plain = [[t.output_ids for t in decode(deep, prompts[:2], drafter=NoDrafter(deep), policy=policies[0])]] * 2
    capacity = 24 + max(map(len, prompts))
    deep.reserve(1, capacity, 8)
    drafter.reserve(1, capacity, 8)
    loops = [
        Decoder(
            Parts(deep, drafter, p, Rejection(), Sampler()),
            batch=1,
            capacity=capacity,
            seed=0,
            decode=deep.text,
            stop=(),
        )
        for p in policies
    ]

    def answers(loop):
        jobs = [Job(i, "test", 0, ids, 24) for i, ids in enumerate(prompts[:2])]
        return [e.turn.output_ids for e in loop.run(iter(jobs)) if e.done]

    for _ in range(2):
        assert [answers(loop) for loop in loops] == plain
    made = [loop.graphs.how.recorded for loop in loops]
    assert [answers(loop) for loop in loops] == plain
    assert [loop.graphs.how.recorded for loop in loops] == made, "as long as nothing changes, nothing is recorded anew"
    deep.release()
    deep.reserve(1, capacity, 8)
    assert [answers(loop) for loop in loops] == plain
    assert all(loop.graphs.how.recorded > before for loop, before in zip(loops, made))
