"""experiments/peers.py and growth.py: the same weights for all, nobody sped up by us, and tables that say what was measured."""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from specresearch.models import linear, tiny
from specresearch.models.distilled import save_student, student
from specresearch.models.vocabulary import DraftVocabulary
from specresearch.types import UserError

ROOT = Path(__file__).parents[1]
KEPT = torch.arange(3, 203)


@pytest.fixture
def bench(monkeypatch):
    """The experiments' modules as they find each other when one is run."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    names = (
        "peers",
        "race",
        "engines",
        "libraries",
        "plain_models",
        "standing",
        "growth",
        "machine",
        "curves",
        "aside",
    )
    of = {name: name if name in ("peers", "growth") else f"peer.{name}" for name in names}
    loaded = {name: importlib.import_module(path) for name, path in of.items()}
    for name in ("race", "growth"):
        monkeypatch.setattr(loaded[name], "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(loaded["peers"], "TUNED_ON", 3)
    yield type("Bench", (), loaded)
    for name in (*of.values(), "peer", "swept"):
        sys.modules.pop(name, None)


@pytest.fixture
def models(bench, tmp_path):
    target = tiny.load(layers=3)
    linear.halve(target.model)
    save_student(student(target, [0, 2], KEPT), tmp_path / "small", [0, 2], {})
    made = bench.plain_models.Models(["target=tiny", "target.layers=3", f"small_lm:drafter.id={tmp_path}/small"])
    made.__dict__["target"] = target
    return made


# -- the same weights ------------------------------------------------------------------------------------------------------


def test_copies_have_the_same_weights_and_are_plain(models):
    ours, theirs = models.target.model, models.plain("transformers")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
        assert tensor.data_ptr() != theirs.state_dict()[name].data_ptr()
    assert {type(m) for m in theirs.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert any(type(m) is linear.Linear for m in ours.modules())
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert theirs is models.plain("transformers") and theirs is not models.plain("economize")
    assert models.plain("transformers", torch.bfloat16).dtype == torch.bfloat16


def test_copies_are_rounded_as_ours_are(models):
    weight = models.plain("transformers").model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == torch.float32 and torch.equal(weight, weight.half().float())


@torch.no_grad()
def test_copies_compute_what_the_target_computes(models):
    ids = torch.arange(20)[None] * 7 % 250
    places = torch.arange(20)
    assert torch.allclose(models.plain("x")(ids).logits, models.target.plain(ids, places), atol=1e-4)


def test_the_small_model_has_our_drafters_law(models):
    ours = models.parts("drafter=small_lm", name="small_lm").drafter.model.model
    theirs, ids = models.small("transformers"), torch.arange(12)[None] * 5 % 250
    with torch.no_grad():
        logits, expected = theirs(ids).logits, ours(ids).logits
    assert logits.shape == (1, 12, 257)
    assert torch.allclose(logits[..., KEPT], expected, atol=1e-5)
    assert (logits[..., [0, 1, 2, 203, 256]] == -torch.inf).all()
    layers = [m for m in theirs.modules() if isinstance(m, nn.Linear)]
    assert layers and {type(m) for m in layers} == {nn.Linear}


def test_spread_is_the_draft_vocabularys(bench):
    weight, vocabulary = torch.randn(40, 8), DraftVocabulary(100, 40)
    vocabulary.keep(torch.arange(100)[1::2][:40])
    x = torch.randn(2, 3, 8)
    own = bench.plain_models.Spread(weight, vocabulary.kept, 100)(x)
    assert torch.equal(own, vocabulary.spread(x @ weight.T, 100))


def test_bytes_of_a_pass(bench, models):
    model = models.target.model
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert bench.machine.weight_bytes(model) == 2 * matrices + 4 * norms
    assert bench.machine.weight_bytes(models.plain("x")) == 4 * (matrices + norms)
    assert bench.machine.weight_bytes(model, 2) == 2 * (matrices + norms)


def test_bandwidth_is_measured(bench):
    assert 1e7 < bench.machine.bandwidth(torch.device("cpu"), 1 << 22) < 1e13


# -- the race --------------------------------------------------------------------------------------------------------------


ROWS = ["hf", "hf_assisted", "plain", "small_lm"]


def run(bench, tmp_path, capsys, *more, rows=ROWS):
    asked = [json.dumps({"id": i, "kind": f"kind {i % 3}", "prompt": f"rain {i}, the rain {i}, the"}) for i in range(9)]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    prompts = ["prompts=file", f"prompts.path={tmp_path}/asked.jsonl"]
    given = [f"out={tmp_path}/out", "target=tiny", "target.layers=3", f"rows={','.join(rows)}", *prompts]
    bench.peers.main([*given, *more])
    return capsys.readouterr().out


def lines_of(tmp_path):
    return [json.loads(x) for x in (tmp_path / "out" / "lines.jsonl").read_text().splitlines()]


def test_a_race_is_gone_on_with(bench, models, tmp_path, capsys):
    small = f"small_lm:drafter.id={tmp_path}/small"
    run(bench, tmp_path, capsys, "limit=1", "max_new_tokens=6", small)
    text = run(bench, tmp_path, capsys, "limit=2", "max_new_tokens=6", small)
    lines = [x for x in lines_of(tmp_path) if x["row"] != "bandwidth"]
    assert [(x["row"], x["id"]) for x in lines] == [(r, 0) for r in ROWS] + [(r, 1) for r in [*ROWS[1:], ROWS[0]]]
    assert all(x["tokens"] == len(x["output_ids"]) == 6 for x in lines)
    for row in ROWS:
        assert [x["output_ids"] for x in lines if x["row"] == row] == [
            x["output_ids"] for x in lines if x["row"] == "plain"
        ][:2]
    assert text.count("2 of 2") == len(ROWS)
    passes = {x["row"]: x["passes"] for x in lines}
    assert passes["hf"] == passes["plain"] == 6
    before = (tmp_path / "out" / "lines.jsonl").read_bytes()
    again = run(bench, tmp_path, capsys, "limit=2", "max_new_tokens=6", small)
    assert (tmp_path / "out" / "lines.jsonl").read_bytes() == before  # complete: only read
    assert again.split("| goal |")[0] == text.split("| goal |")[0]
    with pytest.raises(SystemExit) as left:
        run(bench, tmp_path, capsys, "limit=2", "max_new_tokens=7", small)
    assert left.value.code == 1 and "have changed" in capsys.readouterr().err


def test_settings_are_found_on_other_prompts(bench, tmp_path, capsys):
    rows = ["hf", "hf_lookup", "economize_jump"]
    text = run(bench, tmp_path, capsys, "tune=true", "max_new_tokens=3", rows=rows)
    tried = [json.loads(x) for x in (tmp_path / "out" / "tuning.jsonl").read_text().splitlines()]
    assert {x["id"] for x in tried} == {6, 7, 8}
    chosen = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert chosen.keys() == {"hf_lookup"} and text.count(" *") == 1

    def rate(row):
        own = [x for x in tried if x["row"] == row]
        return sum(x["tokens"] for x in own) / sum(x["seconds"] for x in own)

    settings = bench.engines.ENGINES["hf_lookup"].settings
    fastest = max(range(len(settings)), key=lambda i: rate(f"hf_lookup@{i}"))
    assert chosen["hf_lookup"] == settings[fastest]


@pytest.mark.parametrize("row", ["flashspec_lookup", "economize_lookup"])
def test_a_library_that_is_missing_has_a_row_that_says_so(bench, row, tmp_path, capsys, monkeypatch):
    library = row.partition("_")[0]
    monkeypatch.setitem(sys.modules, library, None)
    text = run(bench, tmp_path, capsys, "limit=1", "max_new_tokens=2", rows=["hf", row, "economize_mtp"])
    assert f"cannot: {library} is not installed" in text
    assert "this target ships no such modules" in text


def test_other_libraries_give_the_same_answers(bench, models):
    prompt = models.target.encode("the rain in spain stays mainly in the plain, the rain in")
    expected = bench.engines.start("plain", models, {})(prompt, 10).ids
    for name, library in (
        ("flashspec_hybrid", "flashspec"),
        ("economize_hybrid", "economize"),
        ("economize_exit", "economize"),
    ):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        found = bench.engines.start(name, models, bench.engines.ENGINES[name].settings[0])(prompt, 10)
        assert found.ids == expected and 1 < found.passes <= 12


def test_mistakes_are_said_in_one_line(bench, tmp_path, capsys):
    for given, says in (
        ("rows=hff", "hff"),
        ("limit=54", "tune=true"),
        ("repeats=0", "repeats"),
        ("limitt=3", "limitt"),
    ):
        with pytest.raises(SystemExit) as left:
            bench.peers.main([f"out={tmp_path}/out", "target=tiny", "rows=plain", given])
        assert left.value.code == 1
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and says in error[0]


def test_a_fault_is_a_cell_of_the_table(bench, models, monkeypatch):
    racer = bench.race.Racer("plain", {}, models)
    prompt = bench.race.Prompt(0, "qa", [1, 2, 3])
    assert racer.answer(prompt, 2)["tokens"] == 2

    def broken(ids, budget):
        raise RuntimeError("their  fault")

    racer.decode = broken
    assert racer.answer(prompt, 2) is None and racer.fault == "RuntimeError: their fault"


def test_where_answers_part(bench, models):
    prompt = [5, 6, 7]
    logits = models.target.reference(prompt, [2])[0]
    best, next_best = logits.topk(2).indices.tolist()
    gap = bench.aside.distance(models.target, prompt, [best, 1], [next_best, 1])
    assert gap == pytest.approx(float(logits[best] - logits[next_best]), abs=1e-5)
    assert bench.aside.distance(models.target, prompt, [best], [best, 1]) == float("inf")


# -- the tables ------------------------------------------------------------------------------------------------------------


def standing(bench, **seconds):
    """Ten tokens an answer; ids 0 .. 6 of two kinds; a token's time by row."""
    lines = [{"row": "bandwidth", "id": i, "repeat": 0, "rate": 1e9} for i in range(7)]
    for row, each in seconds.items():
        for i in range(7):
            kind = "rag" if i % 2 else "qa"
            time = {"prefill": 0.0, "target": 0.8 * each * 10, "draft": 0.1 * each * 10, "verify": 0.1 * each * 10}
            place = {"row": row, "id": i, "kind": kind, "repeat": 0, "tokens": 10, "passes": 7}
            place |= {"output_ids": [i] * 10, "prompt_tokens": 5 * i}
            lines.append(place | {"seconds": each * 10 * (1 + i), "time": {k: v * (1 + i) for k, v in time.items()}})
    about = {
        "weights": {"ours": 5e7, "float32": 1e8},
        "token_bytes": 1e6,
        "settings": {},
        "max_new_tokens": 10,
        "overrides": [],
        "where": "here",
    }
    about |= {"passes": {"1": 0.05, "32": 0.08}, "batch": {"plain": [20.0], "eagle": [10.0, 30.0, 25.0]}}
    held = {row: "float32" if row.startswith(("hf", "flashspec", "economize")) else "ours" for row in seconds}
    return bench.standing.Standing({row: row for row in seconds}, held, lines, about, {"plain": 3 << 20})


def test_figures(bench):
    s = standing(bench, hf=0.2, plain=0.1, eagle=0.05)
    assert s.against("plain", "hf").value == pytest.approx(2)
    assert s.against("eagle", "plain", [0, 2]).value == pytest.approx(2)
    assert s.accepted("eagle") == pytest.approx(9 / 6)
    assert s.floor("hf") == pytest.approx(0.2 * 4 / 0.1)  # (1 + .. + 7) / 7 = 4 times its first token's time
    assert s.floor("plain") == pytest.approx(0.1 * 4 / 0.05)
    assert s.median("plain") == pytest.approx(1 / 0.1 / 4)
    for x in s.lines:
        if x["row"] == "plain":
            x["seconds"], x["time"]["prefill"] = x["seconds"] + 3, 3.0  # a prompt's time does not count
    read = sum(6 * (5e7 + 1e6 * (5 * i + 5)) for i in range(7))
    assert s.step_over_floor("plain") == pytest.approx(28 * 1e9 / read)
    assert bench.standing.outside(s, "eagle") == pytest.approx(0.1)
    cells = bench.standing.cells(s, "plain")
    assert cells[5] == "3 MiB" and cells[6] == "7 of 7" and cells[2].startswith("2.00 [")


def test_the_median_of_repeats_counts(bench):
    s = standing(bench, hf=0.2, plain=0.1)
    slow = [
        x | {"repeat": r, "seconds": x["seconds"] * f}
        for x in s.lines
        if x["row"] == "plain"
        for r, f in ((1, 1), (2, 9))
    ]
    s.lines.extend(slow)
    assert s.against("plain", "hf").value == pytest.approx(2)


def test_an_answer_that_differs_is_counted(bench):
    s = standing(bench, hf=0.2, plain=0.1)
    next(x for x in s.lines if x["row"] == "hf")["output_ids"][3] = 99
    s.about["apart"] = {"hf": 0.00012}
    assert s.equal("hf") == "6 of 7, 0.0001 apart"


def test_goals_are_met_or_not(bench):
    s = standing(bench, hf=0.2, hf_bf16=0.18, hf_lookup=0.15, flashspec_lookup=0.08, plain=0.1, ngram=0.1, eagle=0.06)
    for x in s.lines:
        if x["row"] == "flashspec_lookup" and x["kind"] == "rag":
            x["seconds"] /= 1.25
    s.held["hf_bf16"] = "float32"
    met = {
        name: (figure, yes)
        for name, figure, yes in [*bench.standing.speed(s), *bench.standing.steps(s), *bench.standing.drafting(s)]
    }
    by = lambda text: next(each for name, each in met.items() if text in name)  # noqa: E731
    assert by(": 1.6")[1] == "yes" and by(": 1.6")[0].startswith("1.80 [")  # against the faster of generate's two
    assert by("at most 2")[1] == "no"
    assert by("at most 1.35") == ("1.60", "no")
    assert by("batch 8")[1] == "yes"
    assert by("eagle: outside")[1] == "no"
    assert by("eagle / transformers' generate")[1] == "yes"
    assert by("best assisted")[1] == "yes"
    assert by("best of flashspec") == ("1.07 on rag (flashspec_lookup)", "yes")
    assert by("best of economize")[1] == "not measured"
    assert by("copying prompts")[1] == "yes"
    slower = standing(bench, hf=0.2, economize_model=0.05, eagle=0.06)
    assert bench.standing.ahead(slower, "eagle", "economize")[0][2] == "no"


# -- growth ----------------------------------------------------------------------------------------------------------------


def test_steps_are_timed_behind_a_cache_that_nobody_computed(bench, models):
    parts = models.parts("drafter=ngram")
    point = bench.curves.Point("batch", 2, "eagle")
    asked = []
    models.target.extend = lambda *args: asked.append(args)  # a prompt that was computed after all
    times = bench.growth.step_times(parts, point)
    del models.target.extend
    assert not asked and set(times) == {"prefill", "draft", "target", "verify", "commit", "other"}
    assert times["target"] > 0 and times["prefill"] == 0


def test_points_and_floors(bench):
    c = bench.curves
    assert c.Point("tree", 1, "plain").overrides() == ["drafter=none"]
    assert "tree.size=2" in c.Point("tree", 2, "eagle").overrides()
    assert [p.mode for p in bench.growth.points(["tree"])][:2] == ["plain", "eagle"]
    lines = [{"curve": "bandwidth", "round": 0, "rate": 1e9}]
    curves = c.Curves(lines, [], {"weights": 5e6, "cache": 100})
    assert curves.floor(c.Point("batch", 4, "plain")) == pytest.approx((5e6 + 100 * 256 * 4) / 1e6)
    assert curves.floor(c.Point("context", 1000, "plain")) == pytest.approx(5.1)


def test_the_law_is_fitted(bench):
    assert bench.curves.law([1, 2, 3, 4], [12, 14, 16, 18], "ms", "batch") == "10 + 2 batch ms, off by at most 0"
    assert "off by at most 3" in bench.curves.law([0, 1, 2], [0, 4.5, 0], "ms", "x")


def test_growth_prints_its_tables(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.curves, "XS", {"tree": (1,), "context": (256,), "batch": (1, 2, 3)})
    monkeypatch.setattr(bench.growth, "XS", bench.curves.XS)
    monkeypatch.setattr(
        bench.growth, "points", lambda curves: [bench.curves.Point("batch", x, "plain") for x in (1, 2, 3)]
    )
    given = [f"out={tmp_path}", "curves=batch", "rounds=1", "target=tiny"]
    (tmp_path / "memory.jsonl").write_text(
        "".join(json.dumps({"curve": "batch", "x": x, "bytes": (7 + x) << 20}) + "\n" for x in (1, 2, 3))
    )
    bench.growth.main(given)
    text = capsys.readouterr().out
    assert "| batch | plain pass, ms |" in text and "7 + 1 batch MiB, off by at most" in text
    before = (tmp_path / "lines.jsonl").read_text()
    bench.growth.main(given)
    assert (tmp_path / "lines.jsonl").read_text() == before and len(before.splitlines()) == 4


def test_the_package_never_imports_the_peers():
    for path in (*(ROOT / "specresearch").rglob("*.py"), *(ROOT / "drafters").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            )
            assert not {name.split(".")[0] for name in names} & {"flashspec", "economize"}
    assert UserError  # the experiments' errors are the package's
