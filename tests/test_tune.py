"""The search for the fastest tree: its prices, its predictions against runs, what it writes, and how it goes on."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from specresearch import cli, tune
from specresearch.build import build
from specresearch.drafters.ngram import NGram
from specresearch.models.hf import HFModel
from specresearch.overrides import CONF
from specresearch.run import Run
from specresearch.trees.dynamic import DynamicTree
from specresearch.tuning import preset, servers
from specresearch.tuning.choose import Choice, best, trees
from specresearch.tuning.measure import depths_to_measure
from specresearch.types import Drafter, UserError
from specresearch.whatif.price import Prices, by_size, target_prices
from specresearch.whatif.walk import Walk

SMALL = (
    "target=tiny target.dtype=float64 drafter=small_lm drafter.layers=1 limit=2 max_new_tokens=12 depth=2 topk=2 size=5"
)


def run(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["tune", *given])
    with pytest.raises(SystemExit) as ended:
        tune.main()
    return ended.value.code


@pytest.fixture
def away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_drafting_is_priced_by_depth_and_width():
    beside = {1: {1: 1.0, 2: 2.0, 4: 6.0}, 4: {1: 2.0, 2: 3.0, 4: 7.0}}
    prices = Prices({1.0: 10.0, 8.0: 17.0}, 99.0, 99.0, 5.0, 1.0, False, "", beside)
    assert prices.drafting(3, 1) == 4
    assert prices.drafting(3, 2) == pytest.approx(4 + 1 / 3)
    walk = Walk(steps=3.0, sizes={4: 3})
    assert prices.seconds(walk, 4, 3, 1) == pytest.approx(5 + 3 * (13 + 4))


def test_a_batch_pays_for_the_nodes_of_all_rows():
    summary = {"costs": {"target": {"1": 1.0, "8": 2.0, "16": 4.0}}}
    table, _ = target_prices(summary, [], [4], 4.0, rows=4.0)
    assert by_size(table, 2) == pytest.approx(2.0)  # 8 nodes


def test_what_is_tried():
    tried = [
        (tree.depth, tree.width, tree.size) for tree in trees(DynamicTree(depth=4, topk=3, size=12, temperature=0))
    ]
    assert len(set(tried)) == len(tried)
    assert {(depth, 1, depth + 1) for depth in (1, 2, 3, 4)} <= set(tried)
    assert (2, 3, 6) in tried
    assert (4, 3, 12) in tried
    assert all(size <= 12 for *_, size in tried)
    assert depths_to_measure(1) == [1]
    assert depths_to_measure(5) == [1, 2, 5]


def test_the_best_by_measurement_where_there_is_one():
    fast, slow = Choice(2, 1, 3, 1.5, 1.4, 14.0), Choice(3, 2, 6, 1.9, 1.3, 13.0)
    assert best([slow, fast], "tokens_per_second", 1) == [fast]
    assert best([slow, fast], "mean_accepted_length", 1) == [slow]
    ran = Choice(2, 1, 3, 1.5, 1.4, 14.0, 1.5, 1.26, 12.0)
    assert best([slow, ran], "speedup", 1) == [slow]
    assert ran.gap == pytest.approx(-0.1)


def test_settings_of_servers():
    tree = {"depth": 3, "topk": 2, "size": 8}
    shape = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 8"
    assert (
        servers.sglang("eagle", {}, tree)
        == f"--speculative-algorithm EAGLE3 --speculative-draft-model-path OUT/sglang {shape}"
    )
    assert "EAGLE " in servers.sglang("eagle", {}, tree, version=1)
    assert "STANDALONE --speculative-draft-model-path org/small" in servers.sglang(
        "small_lm", {"id": "org/small"}, tree
    )
    assert "NGRAM --speculative-num-draft-tokens 8" in servers.sglang("ngram", {}, tree)
    assert "no medusa" in servers.sglang("medusa", {}, tree)

    def settings(drafter, keys):
        line = servers.vllm(drafter, keys, 4).partition("   (")[0]
        return json.loads(line.partition("'")[2].rpartition("'")[0])

    assert settings("eagle", {}) == {"method": "eagle3", "model": "OUT/vllm", "num_speculative_tokens": 4}
    assert settings("medusa", {})["method"] == "medusa"
    assert settings("small_lm", {"id": "x"}) == {"method": "draft_model", "model": "x", "num_speculative_tokens": 4}
    found = settings("ngram", {"min_n": 2, "max_n": 4})
    assert (found["prompt_lookup_min"], found["prompt_lookup_max"]) == (2, 4)
    mixed = {"id": "x", "vocab": "intersection", "revision": "v1"}
    assert servers.sglang("small_lm", mixed, tree).startswith(
        "none: SGLang needs a draft model of the target's vocabulary"
    )
    assert settings("small_lm", mixed)["use_heterogeneous_vocab"] is True
    assert settings("small_lm", mixed)["revision"] == "v1"
    same = servers.sglang("small_lm", mixed | {"vocab": "same"}, tree)
    assert "--speculative-draft-model-revision v1" in same


@pytest.mark.parametrize("keys", [{"layers": 1}, {"id": None}, {"id": CONF + "/../checkpoints/smollm2/small_lm"}])
def test_no_settings_for_what_no_server_serves(keys):
    tree = {"depth": 3, "topk": 2, "size": 8}
    assert servers.sglang("small_lm", keys, tree).startswith("none: SGLang ")
    assert servers.vllm("small_lm", keys, 3).startswith("none: vLLM ")


def test_the_export_reads_the_head_as_the_search_did():
    given = ["target=hf", "target.id=org/big", "drafter.ckpt=a b", "drafter.config={taps: [1]}", "limit=2"]
    line = servers.export("eagle", {"ckpt": "a b"}, {"depth": 2, "topk": 1, "size": 3}, "org/big", given)
    words = "ckpt='a b'|out=OUT|config={taps: [1]}|target=hf|target.id=org/big|tree.depth=2|tree.topk=1|tree.size=3"
    assert shlex.split(line)[3:] == words.split("|")
    assert "checkpoints/smollm2/medusa" in servers.export("medusa", {"ckpt": "auto"}, {}, "smollm2")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["temperature=0.7"], "use temperature=0"),
        (["objective=joy"], "objective=joy is unknown"),
        (["confirm=0"], "confirm=0"),
        (["drafter=simulated"], "drafter=simulated cannot be asked"),
        (["drafter=none"], "drafter=none cannot be asked"),
        (["tree.depth=3"], "tune searches chains and dynamic trees itself"),
        (["tree=chain"], "tune searches chains and dynamic trees itself"),
        (["baseline=false"], "sets it itself"),
        (["size=1"], "error: size=1 cannot hold depth=5 levels and the root: use size=6 or more"),
        (["depth=0"], "error: depth=0: use a whole number"),
        (["topk=auto"], "error: topk=auto: use a whole number"),
        (["verifier=block"], "verifier=block cannot verify all the trees"),
        (["drafter=small_lm", "drafter.id=any", "drafter.vocab=text"], "error: drafter.vocab=text drafts one chain"),
    ],
)
def test_mistakes_are_said_in_one_line(away, monkeypatch, capsys, given, says):
    assert run(monkeypatch, "target=tiny", *given) == cli.ERROR
    (line,) = (text for text in capsys.readouterr().err.splitlines() if text.startswith("error:"))
    assert says in line
    assert "tree.size" not in line


def test_from_recording_to_preset_and_on_after_ctrl_c(away, monkeypatch, capsys):
    """Interrupted while the best are run: the table so far is shown, and going on decodes only what is left."""
    real, blocks = Run._block, []

    def breaking(self, index):
        blocks.append((self.folder.name, index))
        if len(blocks) == 2 + 3:  # two of the recording, then four runs in turn
            raise KeyboardInterrupt
        real(self, index)

    monkeypatch.setattr(Run, "_block", breaking)
    assert run(monkeypatch, *SMALL.split(), "hydra.run.dir=found") == cli.INTERRUPTED
    said = capsys.readouterr()
    assert "go on with  python -m specresearch.tune resume=" in said.err
    first = json.loads((away / "found/tuned.json").read_text())
    probes = (away / "found/recorded/probes.json").read_text()
    before = [name for name, _ in blocks[:-1]]
    monkeypatch.setattr(
        Run, "_block", lambda self, index: (blocks.append((self.folder.name, index)), real(self, index))[1]
    )
    assert run(monkeypatch, "resume=found") == cli.OK
    after = [name for name, _ in blocks[len(before) + 1 :]]
    assert before.count("recorded") == 2
    assert "recorded" not in after
    assert (away / "found/recorded/probes.json").read_text() == probes
    assert len(before) + len(after) == 2 + 4 * 2
    said = capsys.readouterr().out
    found = json.loads((away / "found/tuned.json").read_text())
    assert [one["name"] for one in found["predicted"]] == [one["name"] for one in first["predicted"]]
    for one in found["confirmed"]:
        assert one["ran_length"] == pytest.approx(one["length"])  # the same answers: acceptance is foretold exactly
    top = max(found["confirmed"], key=lambda one: one["ran_speedup"])
    assert f"chosen  {top['name']}" in said
    assert "of the prediction" in said
    assert f"{top['gap']:+.1%}" in said
    assert "none: SGLang does not draft with the target's own first layers" in said
    assert "A_DRAFT_MODEL" not in said
    preset = yaml.safe_load((away / "conf/experiment/tuned-small_lm-tiny.yaml").read_text())
    assert preset["tree"] == {key: top[key] for key in ("depth", "topk", "size")}
    assert f"experiment=tuned-small_lm-tiny 'hydra.searchpath=[file://{away}/conf]'" in said
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose(
            "config", ["experiment=tuned-small_lm-tiny", f"hydra.searchpath=[file://{away}/conf]", "tracker=none"]
        )
    parts = build(cfg)
    assert (parts.policy.depth, parts.policy.width, parts.policy.size) == (top["depth"], top["topk"], top["size"])
    assert cfg.drafter.layers == 1


HARD = """it's {a}, "b" ${x} [c] \\"""
TINY = "target=tiny drafter=ngram drafter.min_n=1 limit=1 max_new_tokens=6 depth=1 topk=1 size=2 confirm=1"


def again(monkeypatch, capsys, said, start):
    """Run the one printed command that starts so, as a shell reads it -> the configuration that it ran with."""
    (line,) = (text.strip() for text in said.splitlines() if text.strip().startswith(f"python -m specresearch {start}"))
    given = shlex.split(line)[3:]
    monkeypatch.setattr(sys, "argv", ["specresearch", *given, "tracker=none", "limit=1", "hydra.run.dir=again"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.OK, capsys.readouterr().err
    return yaml.safe_load(Path("again/config.yaml").read_text())


def test_what_is_printed_runs_and_means_the_same(away, monkeypatch, capsys):
    """A prompt of all signs, a grammar, a folder with a blank: the command and the preset run under what was searched under."""
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    kept = [
        "repetition_penalty=1.1",
        'stop=["x y"]',
        "grammar=regex",
        "grammar.pattern=[a-z ,]{1,9}'?",
        "logit_bias={11:-5}",
    ]
    given = [*TINY.split(), "prompts=text", f"prompts.text={HARD}", *kept, "out=my, folder", "hydra.run.dir=found"]
    given[given.index("out=my, folder")] = "out='my, folder'"
    assert run(monkeypatch, *given) == cli.OK
    said = capsys.readouterr().out
    found = json.loads((away / "found/tuned.json").read_text())["confirmed"]
    assert all(one["ran_length"] == pytest.approx(one["length"]) for one in found)  # under the grammar, too
    first = yaml.safe_load((away / "found/config.yaml").read_text())
    assert first["prompts"]["text"].replace("\ue000", "$") == HARD
    alike = ("prompts", "grammar", "stop", "repetition_penalty", "logit_bias", "drafter", "max_new_tokens", "target")
    for start in ("target=tiny", "experiment=tuned-ngram-tiny"):
        ran = again(monkeypatch, capsys, said, start)
        of = alike if start[0] == "t" else alike[1:]  # what is asked is no part of a preset
        assert {key: ran[key] for key in of} == {key: first[key] for key in of}
        assert ran["tree"]["depth"] == 1


def test_presets_of_other_searches_stay(away):
    """Each search has a file of its own, which the same search writes again."""
    chosen, choices = Choice(2, 1, 3, 1.5, 1.4, 14.0, 1.5, 1.3, 13.0), {"drafter": "ngram", "target": "tiny"}
    choices |= {"verifier": "rejection", "grammar": "none", "kernels": "auto", "prompts": "builtin"}
    base, asked = ["target=tiny", "drafter=ngram"], ["drafter.max_n=3", "stop=[x]", "limit=3", "objective=speedup"]
    with initialize_config_dir(CONF, version_base="1.3"):
        for _ in range(2):
            for number, given in enumerate([[], *([one] for one in asked)], 1):
                path, taken = preset.write(compose("tune", [*base, *given]), chosen, choices)
                assert path.stem == "tuned-ngram-tiny" + (f"-{number}" if number > 1 else "")
                assert (taken is None) == (number == 1)
    assert len(list((away / "conf/experiment").iterdir())) == 5
    assert yaml.safe_load((away / "conf/experiment/tuned-ngram-tiny-3.yaml").read_text())["stop"] == ["x"]


def test_another_drafter_on_top_of_a_preset(away, monkeypatch, capsys):
    """What the search left at its default asks nothing of the other; for the rest, the error says what to write."""
    assert run(monkeypatch, *TINY.split()) == cli.OK
    place = f"hydra.searchpath=[file://{away}/conf]"
    with initialize_config_dir(CONF, version_base="1.3"):
        given = ["experiment=tuned-ngram-tiny", place, "drafter=small_lm", "drafter.layers=1", "tracker=none"]
        with pytest.raises(UserError, match=r"drafter=small_lm has no min_n: .* add  ~drafter\.min_n$"):
            build(compose("config", given))
        assert build(compose("config", [*given, "~drafter.min_n"])).drafter.model is not None


@pytest.mark.slow
def test_prediction_and_run_agree_where_costs_are_known(away, monkeypatch, capsys):
    """A clock that only the model's passes and the drafter's answers move. Depth, width and size each have their price."""
    now, forward, expand, reserve = [0.0], HFModel.run, NGram.expand, NGram.extend

    def spend(seconds):
        now[0] += seconds

    def pass_of(self, tokens, positions, length, *args, **kwargs):
        spend(0.040 + 0.004 * tokens.shape[1] + 1e-5 * int(length.max()))
        return forward(self, tokens, positions, length, *args, **kwargs)

    def answer(self, frontier):
        spend(0.006 + 0.001 * frontier.tokens.shape[1])
        return expand(self, frontier)

    def read(self, rows, tokens, *args):
        spend(1e-4 * tokens.shape[1])
        return reserve(self, rows, tokens, *args)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(HFModel, "run", pass_of)
    monkeypatch.setattr(NGram, "expand", answer)
    monkeypatch.setattr(NGram, "extend", read)
    monkeypatch.setattr(NGram, "propose", Drafter.propose)  # every step drafts
    given = "target=tiny drafter=ngram drafter.min_n=1 limit=3 max_new_tokens=24 depth=3 topk=3 size=8 confirm=9"
    assert run(monkeypatch, *given.split(), "hydra.run.dir=found") == cli.OK
    found = json.loads((away / "found/tuned.json").read_text())["confirmed"]
    assert len(found) == 9
    assert all(abs(one["gap"]) < 0.03 for one in found), [(one["name"], one["gap"]) for one in found]
    said = capsys.readouterr().out
    assert "within 10% of the prediction" in said
    assert "NOT within" not in said
    assert "other work" not in said
