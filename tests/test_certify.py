"""The certify command: what each layer says on honest and on faulty engines, what it writes, and how it goes on."""

import itertools
import json

import pytest
import torch

import specresearch
from specresearch import audited, certify
from specresearch.conversations import Settings
from specresearch.models.hf import HFModel
from specresearch.prompts import Question
from specresearch.verifiers.rejection import Rejection

BASE = ["target=tiny", "tracker=none", "max_new_tokens=16", "limit=4", "batch_size=4", "rules=chosen"]
CHAIN = ["tree=chain", "drafter=small_lm", "drafter.layers=1"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """-> exit status, certificate or None, output, errors"""

    def call(*overrides: str, folder: str = "out"):
        resumes = any(o.startswith("resume=") for o in overrides)
        drafter = [] if any(o.startswith("drafter=") for o in overrides) else ["drafter=ngram"]
        base = [] if resumes else [*BASE, *drafter, f"hydra.run.dir={tmp_path}/{folder}"]
        given = [*base, *overrides]
        monkeypatch.setattr("sys.argv", ["certify", *given])
        with pytest.raises(SystemExit) as left:
            certify.main()
        path = tmp_path / folder / "certificate.json"
        out, err = capsys.readouterr()
        return left.value.code, json.loads(path.read_text()) if path.exists() else None, out, err

    return call


@pytest.fixture
def few_shapes(monkeypatch):
    """All of them are in tests/test_law.py."""
    every = certify.shapes_for

    def some(verifier):
        return {name: policy for name, policy in every(verifier).items() if name in ("chain iid", "wide topk")}

    monkeypatch.setattr(certify, "shapes_for", some)


def credulous(monkeypatch):
    """The rejection rule keeps whatever is drafted."""
    verify = Rejection.verify

    class Rng:
        def __init__(self, rng):
            self.rng = rng

        def __getattr__(self, name):
            return getattr(self.rng, name)

        def accept(self, coin_id, threshold):
            self.rng.accept(coin_id, threshold)
            return threshold > 0

        def uniforms(self, nodes):
            return None

    monkeypatch.setattr(Rejection, "verify", lambda self, tree, p, rng: verify(self, tree, p, Rng(rng)))


def test_an_honest_engine_passes_in_every_layer(run):
    status, found, out, _ = run("layers=[l2,l3,l4]", "tokens=150", *CHAIN)
    assert status == 0 and found["verdict"] == "passed"
    assert {name: layer["verdict"] for name, layer in found["layers"].items()} == {
        **{"l2": "consistent", "l3": "consistent", "l4": "exact"}
    }
    assert found["layers"]["l3"]["tokens"] >= 150
    assert "would have seen a bias of TV" in out
    assert {row["name"]: row["kind"] for row in found["layers"]["l2"]["rows"]}["coins"] == "tested"


def test_the_rules_are_certified_without_a_model(run, few_shapes, monkeypatch):
    monkeypatch.setattr(HFModel, "__init__", lambda *args: pytest.fail("a model was loaded"))
    status, found, out, _ = run("layers=[l0,l1]", "verifier=sample_and_match")
    assert status == 0 and {r["rule"] for r in found["layers"]["l0"]["rows"]} == {"sample_and_match"}
    assert max(r["worst"] for r in found["layers"]["l0"]["rows"]) <= 1e-12
    assert "12/12" in out


def test_a_biased_rule_is_caught_by_the_layers_that_can_see_it(run, few_shapes, monkeypatch):
    credulous(monkeypatch)
    status, found, out, _ = run("layers=[l0,l2,l3]", "tokens=2000", "limit=28", *CHAIN)
    assert status == 2 and found["verdict"] == "biased"
    assert {n: layer["verdict"] for n, layer in found["layers"].items()} == {
        **{"l0": "biased", "l2": "violation", "l3": "violation"}
    }
    assert found["layers"]["l3"]["tokens"] < 2000, "evidence that is plain ends the run"
    assert "counter-example, rejection on chain" in out


def test_positions_off_by_one_are_a_fault_of_the_forward(run, monkeypatch):
    honest = HFModel.run

    def shifted(self, tokens, positions, *rest, **kwargs):
        return honest(self, tokens, positions + (tokens.shape[1] > 1) * (kwargs.get("rows") is None), *rest, **kwargs)

    monkeypatch.setattr(HFModel, "_check", lambda self: None)
    monkeypatch.setattr(HFModel, "run", shifted)
    status, found, *_ = run("layers=[l4]")
    assert status == 2 and found["layers"]["l4"]["verdict"] == "fault"


def test_answers_come_in_the_order_of_the_questions():
    """Else the answers at hand when there are enough tokens would be the short ones."""
    engine = specresearch.engine("target=tiny", "drafter=ngram", "temperature=1")
    lengths = [3, 40, 5, 30, 2, 20]
    questions = [Question(i, "text", ("ab" * n,)) for i, n in enumerate(lengths)]
    settings = Settings(0, None, 24, 3, [], False, False, False)
    lines = list(itertools.islice(audited.own(engine.parts, questions, settings), 12))
    assert [line["id"] for line in lines] == [*range(6)] * 2
    assert lines[0]["output_ids"] != lines[6]["output_ids"]


def test_any_servers_tokens(run, tmp_path):
    assert run("layers=[l3]", "tokens=400", "limit=28")[0] == 0
    log = f"path={tmp_path}/out/trace.jsonl"
    status, found, *_ = run("engine=tokens", log, folder="again")
    assert status == 0 and [*found["layers"]] == ["l3"] and found["layers"]["l3"]["tokens"] >= 400
    status, found, *_ = run("engine=tokens", log, "temperature=0.4", folder="cooler")
    assert status == 2 and found["layers"]["l3"]["stopped_at"] < 400
    assert run("engine=tokens", log, "temperature=0", folder="greedy")[0] == 2


def test_transformers_generation(run):
    assert run("engine=hf", "assistant=lookup", "tokens=100")[0] == 0
    status, found, *_ = run("engine=hf", "assistant=none", "tokens=40", "temperature=0", folder="greedy")
    assert status == 0 and found["layers"]["l3"]["verdict"] == "lossless"


def test_an_interrupted_certificate_goes_on(run, tmp_path, monkeypatch):
    judge, judged = certify.judge, []

    def stumbling(reference, lines, box):
        judged.extend(lines)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return judge(reference, lines, box)

    monkeypatch.setattr(certify, "judge", stumbling)
    monkeypatch.setattr(certify, "SAVE_SECONDS", 0)
    settings = ["layers=[l3]", "tokens=120", "batch_size=1"]
    status, found, _, err = run(*settings)
    assert (status, found) == (130, None) and f"resume={tmp_path}/out" in err
    status, found, *_ = run(f"resume={tmp_path}/out")
    assert status == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "trace.jsonl").read_text().splitlines()]
    assert found["layers"]["l3"]["tokens"] == sum(len(line["output_ids"]) for line in lines)
    assert len(judged) == len(lines) + 1, "what was judged before is not judged again"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["layers=[l9]"], "layers=l9 is unknown: use some of [l0,l1,l2,l3,l4]"),
        (["layers=[]"], "leaves nothing to do"),
        (["engine=vllm"], "engine=vllm is unknown"),
        (["engine=hf", "layers=[l0]"], "use layers=[l3]"),
        (["engine=tokens"], "engine=tokens needs path=FILE"),
        (["engine=tokens", "path=nowhere.jsonl"], "path=nowhere.jsonl cannot be read"),
        (["rules=some"], "rules=some is unknown: use all or chosen"),
        (["tokens=0", "layers=[l3]"], "tokens=0: use a whole number of at least 1"),
        (["alpha=2", "layers=[l3]"], "alpha=2"),
        (["plan.tv=2"], "plan.tv=2"),
        (["plan.tv=abc"], "plan.tv=abc"),
        (["plan.tv=1e-9"], "use a larger one"),
        (["alpha=abc", "layers=[l3]"], "alpha=abc"),
        (["context=abc", "layers=[l3]"], "context=abc"),
        (["layers=3"], "layers=3 is unknown"),
        (["tokenz=3"], "did you mean tokens?"),
        (["verifier=typical", "layers=[l3]", "tree=chain"], "lossy"),
    ],
)
def test_mistakes_are_said_in_one_line(run, arguments, says):
    status, found, _, err = run(*arguments)
    (line,) = err.strip().splitlines()
    assert status == 1 and found is None and says in line


def test_resuming_forgets_nothing_that_the_white_box_saw(run, tmp_path, monkeypatch):
    credulous(monkeypatch)
    status, found, *_ = run("layers=[l2]", "tokens=300", *CHAIN)
    assert (status, found["layers"]["l2"]["verdict"]) == (2, "violation")
    status, again, *_ = run(f"resume={tmp_path}/out")
    assert (status, again["layers"]["l2"]) == (2, found["layers"]["l2"])


def test_what_was_not_tested_does_not_pass(run):
    status, found, *_ = run("layers=[l3]", "drafter=none", "tokens=60")
    assert (status, found["verdict"]) == (0, "not_exercised") and found["layers"]["l3"]["from_drafts"] == 0
    status, found, out, _ = run("layers=[l3]", "verifier=typical", "lossy=allow", "tokens=60", folder="lossy")
    assert (status, found["verdict"]) == (0, "lossy") and found["layers"]["l3"]["tv_bound"] == 1 and "LOSSY" in out
    status, found, *_ = run("layers=[l2]", "verifier=block", "tokens=60", *CHAIN, folder="blind")
    assert (status, found["verdict"]) == (0, "not_checked")


def test_a_rule_that_declares_no_tree_is_not_checked(run, monkeypatch):
    monkeypatch.setattr(Rejection, "laws", frozenset())
    _, found, *_ = run("layers=[l0,l1]")
    assert {layer["verdict"] for layer in found["layers"].values()} == {"not_checked"}


def test_a_rule_that_fails_is_named(run, few_shapes, monkeypatch):
    monkeypatch.setattr(Rejection, "verify", lambda self, tree, p, rng: None)
    status, _, _, err = run("layers=[l0]")
    assert status == 1 and "verifier Rejection fails on a tree (chain iid)" in err.replace("wide topk", "chain iid")


def test_logs_that_mislead(run, tmp_path):
    line = {"prompt_ids": [70, 71], "output_ids": [1, 2, 3]}
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([json.dumps(line)] * 3))
    assert "2 of 3 answers repeat another one" in run("engine=tokens", f"path={path}")[3]
    path.write_text(json.dumps(line | {"output_ids": [5] * 5000}))
    assert "exceeds the context of 4096" in run("engine=tokens", f"path={path}")[3]
    path.write_text(json.dumps(line | {"output_ids": [10**30]}))
    assert "outside the target's vocabulary" in run("engine=tokens", f"path={path}")[3]


def test_the_edge_of_a_truncation_is_no_proof(run, tmp_path):
    """A token just beyond the nucleus may be another order of summation; one far beyond it is a violation at once."""
    target = specresearch.engine("target=tiny", "drafter=none").parts.target
    law = target.plain(torch.tensor([[70, 71]]), torch.tensor([1]))[0, 0].softmax(-1)
    order = law.argsort(descending=True)
    below = float(law[order[:5]].sum())
    path = tmp_path / "log.jsonl"
    for place, status in ((5, 0), (200, 2)):
        path.write_text(json.dumps({"prompt_ids": [70, 71], "output_ids": [int(order[place])]}))
        assert run("engine=tokens", f"path={path}", f"top_p={below - 1e-5}", folder=f"{place}")[0] == status


def test_a_plan(run):
    status, _, out, _ = run("plan.tv=0.01", "plan.power=0.9")
    assert status == 0 and out.startswith("58,403 sampled tokens")


def test_a_lossy_rule_is_called_lossy(run, few_shapes):
    status, found, out, _ = run("layers=[l0]", "verifier=target_only", "verifier.threshold_acc=0.5", "lossy=allow")
    assert status == 0 and found["verdict"] == "lossy" and "LOSSY" in out
    assert torch.tensor([row["worst"] for row in found["layers"]["l0"]["rows"]]).max() > 0.01
