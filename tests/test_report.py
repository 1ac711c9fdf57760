"""report.html: its numbers, its escaping, its size, and that it is drawn from the folder alone."""

import json
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specresearch import cli
from specresearch.metrics import summarise
from specresearch.report import __main__ as command
from specresearch.report import comparison_report, run_report
from specresearch.report.subject import names, subjects
from specresearch.report.svg import ticks
from specresearch.report.tally import decode_cost, likeliest, step_times, tally
from specresearch.report.timeline import timeline
from specresearch.results import Results, find, read

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements of a page; raises where tags are not closed in turn."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag, **attributes):
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [own for name, own in self.found if name == tag and wanted.items() <= own.items()]


def a_step(tokens, parent, path, next_token=9, ms=10.0):
    score = [-0.5 * i for i in range(len(tokens))]
    fields = {"tokens": tokens, "parent": parent, "score": score, "path": path}
    return {"emitted": len(path), **fields, "next_token": next_token, "ms": ms}


STEPS = [
    a_step([9, 1, 2, 3, 4], [-1, 0, 0, 1, 1], [0, 1, 4]),  # the first child, then its second
    a_step([9, 1, 2, 3, -1], [-1, 0, 0, 2, 0], [0, 2]),  # the second child; a pad
    a_step([9, 1, -1, -1, -1], [-1, 0, 0, 0, 0], [0]),
]


def a_line(id=0, steps=STEPS, kind="qa", **other):
    ids = [8] + [t for s in steps for t in [*(s["tokens"][n] for n in s["path"][1:]), s["next_token"]]]
    fields = {
        "id": id,
        "kind": kind,
        "turn": 0,
        "prompt_ids": [1, 2],
        "output_ids": ids,
        "text": "",
        "finish": "length",
    }
    return fields | {"steps": list(steps)} | other


def a_run(lines=None, folder="runs/one", lossless=None, pieces=None, config=None, **summary):
    """Results made by hand; each answer is a block that took a second, twice that without speculation."""
    lines = [a_line()] if lines is None else lines
    time = {"prefill": 0.1, "draft": 0.2, "target": 0.5, "verify": 0.1, "commit": 0.05, "other": 0.05}
    blocks = []
    for line in lines:
        tokens = len(line["output_ids"])
        own = {"tokens": tokens, "seconds": 1.0, "target_passes": len(line["steps"]), "time": time}
        plain = {"tokens": tokens, "seconds": 2.1, "target_passes": tokens - 1, "time": {"prefill": 0.1, "target": 2.0}}
        blocks.append({"kinds": [line["kind"]], "speculative": own, "baseline": plain, "answers": 1})
    equal = {"kind": "greedy_equality", "verdict": "lossless", "answers": len(lines), "equal": len(lines)}
    equal |= {"reference": "plain decoding", "near_ties": [], "violations": []}
    parts = {"drafter": {"_target_": "specresearch.drafters.ngram.NGram", "max_n": 3}, "temperature": 0, "seed": 0}
    whole = summarise(lines, blocks) | {"lossless": lossless or equal, "config": parts | (config or {})}
    whole |= {"provenance": {"argv": ["x/__main__.py", "drafter=ngram"]}, "peak_memory_bytes": 1, "interrupted": False}
    pieces = {t: f" w{t}" for t in range(10)} if pieces is None else pieces
    return Results(Path(folder), whole | summary, lines, blocks, pieces)


# -- numbers -------------------------------------------------------------------------------------------------------------


def test_nodes_are_counted_by_their_ranks():
    found = tally([a_line()])
    assert found.steps == 3
    assert found.drafted == Counter({(1,): 3, (2,): 2, (1, 1): 1, (1, 2): 1, (2, 1): 1})
    assert {node: n for node, n in found.accepted.items() if n} == {(1,): 1, (1, 2): 1, (2,): 1}
    assert found.offered == Counter({1: 5, 2: 3})  # three roots and two nodes below; two roots and one node
    assert found.taken == Counter({1: 1, 2: 2})
    assert likeliest(found, 2) == [(1,), (2,)]
    assert set(likeliest(found, 9)) == set(found.drafted)


def test_a_step_costs_and_yields():
    cost = decode_cost(a_run().blocks, steps=3)
    plain = 2.0 / 6  # seconds a token: seven tokens, one of them from the prompt
    assert cost is not None
    assert cost == pytest.approx({p: s / 3 / plain for p, s in zip(cost, (0.2, 0.5, 0.1, 0.05, 0.05))})
    assert decode_cost([{"speculative": {}, "answers": 1}], steps=3) is None


def test_step_times_keep_the_middle_and_the_tenths():
    lines = [a_line(steps=[a_step([9], [-1], [0], ms=float(ms)) for ms in range(1, 101)])]
    (whole,) = step_times(lines, bins=1)
    assert (whole.low, whole.middle, whole.high, whole.count) == (11, 50.5, 90, 100)
    assert len(step_times(lines, bins=30)) == 25


def test_ticks_are_round_and_inside():
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(3, 3) == [3]
    assert all(0.013 <= t <= 0.187 for t in ticks(0.013, 0.187))


# -- the page of a run ---------------------------------------------------------------------------------------------------


def test_a_page_is_whole_and_asks_for_nothing():
    for html in (run_report(a_run()), comparison_report([a_run(), a_run(folder="runs/two")])):
        page = Page(html)
        assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
        assert "url(" not in html and "@import" not in html
        for _, own in page.found:
            assert own.get("href", "#").startswith(("#", "data:"))
            assert "src" not in own
        ids = [own["id"] for _, own in page.found if "id" in own]
        assert len(ids) == len(set(ids))
        assert {own["href"][1:] for own in page.all("a")} <= set(ids)
        assert len(page.all("table")) == len(page.all("caption"))
        assert len(page.all("h1")) == 1
        for chart in page.all("svg"):
            assert chart["aria-label"]
        for mark in (own for name, own in page.found if name == "g" and "mark" in own.get("class", "")):
            assert mark["data-tip"] == mark["aria-label"] != ""


def test_the_tree_shows_how_often_each_node_was_kept():
    tips = [own["data-tip"] for own in Page(run_report(a_run())).all("g") if "data-tip" in own]
    assert "child 1 › 2: kept in 33.3% of all steps; drafted in 33.3%, kept there 100.0%" in tips
    assert "child 2: kept in 33.3% of all steps; drafted in 66.7%, kept there 50.0%" in tips
    assert "emitted 3 tokens: 33.3%" in tips and "emitted 1 token: 33.3%" in tips
    assert "child of rank 2 kept: 66.7%" in tips


def test_everything_foreign_is_escaped():
    pieces = dict.fromkeys(range(10), EVIL)
    step = a_step([9, 1, 2], [-1, 0, 0], [0, 1])
    lossless = {"kind": "none", "verdict": "lossy", "reason": EVIL, "tv_bound": None}
    config = {"drafter": {"_target_": f"x.{EVIL}", "note": EVIL}, "stop": [EVIL]}
    evil = a_run([a_line(EVIL, [step], EVIL)], pieces=pieces, lossless=lossless, config=config)
    evil.summary["provenance"] = {"argv": [EVIL, EVIL], "device": {"name": EVIL}, "platform": EVIL}
    for html in (run_report(evil), comparison_report([evil, a_run()])):
        page = Page(html)
        assert not page.all("img")
        assert EVIL not in html
        assert len(page.all("script")) == html.count("<script") == html.count("</script>")
    assert len(Page(run_report(evil)).all("script")) == 2  # the page's own and the data


def entry(verdict, **other):
    tops = {"one_token_top2": {"3": 5.25, "4": 5.2499}, "verify_top2": {"4": 5.25, "3": 5.2499}}
    fields = {"id": 0, "turn": 0, "position": 2, "verdict": verdict, "emitted": 4, "one_token_gap": 1e-4}
    return fields | tops | {"verify_gap": 1e-4, "gap_noise": 3e-4, "logit_noise": 1e-4, "logit_error": 2e-5} | other


def judged(verdict, **lists):
    base = {"kind": "greedy_equality", "verdict": verdict, "answers": 1, "equal": 0, "reference": "plain decoding"}
    return base | {"near_ties": [], "violations": []} | lists


def test_near_ties_show_both_of_the_two_best_tokens():
    html = run_report(a_run(lossless=judged("near_tie", near_ties=[entry("near_tie")])))
    assert "<code> w3</code>&nbsp;5.2500<br><code> w4</code>&nbsp;5.2499" in html
    assert "<code> w4</code>&nbsp;5.2500<br><code> w3</code>&nbsp;5.2499" in html
    assert "0.000100, 0.000100" in html and "0.0003" in html
    assert not Page(html).all("div", role="alert")


def test_a_violation_and_a_lossy_rule_cannot_be_missed():
    bad = judged(
        "violation", violations=[entry("verifier_bug"), {"id": 0, "turn": 0, "position": 3, "verdict": "ends"}]
    )
    html = run_report(a_run(lossless=bad))
    assert "<title>VIOLATION: " in html
    assert len(Page(html).all("div", class_="verdict bad loud", role="alert")) == 2  # on top, and with its evidence
    lossy = {"kind": "none", "verdict": "lossy", "reason": "thresholds below 1", "tv_bound": 0.25}
    html = run_report(a_run(lossless=lossy))
    assert "<title>LOSSY: " in html and "0.25 at most" in html
    assert len(Page(html).all("div", class_="verdict warn loud", role="alert")) == 2
    html = comparison_report([a_run(), a_run(lossless=lossy), a_run(lossless=bad)])
    assert html.count('class="stamp warn">LOSSY<') == html.count('class="stamp bad">VIOLATION<') == 1
    assert len(Page(html).all("div", role="alert")) == 2


def test_predicted_speed_is_shown_where_it_was_measured():
    assert "predicted" not in [own.get("id") for _, own in Page(run_report(a_run())).found]
    html = run_report(a_run(costs={"target": {"1": 0.01, "2": 0.012, "4": 0.02}}, predicted_speedup=1.25))
    assert "a pass over 4 tokens: 20.0 ms" in html
    assert "1.250×" in html
    assert "a pass over" not in run_report(a_run())


def test_a_speedup_has_its_interval_where_there_are_enough_questions():
    few, many = (a_run([a_line(id) for id in range(n)]) for n in (4, 5))
    assert "95%" not in run_report(few) and "95%: [2.10, 2.10]" in run_report(many)
    html = comparison_report([few, many])
    assert "2.10×</b>" in html and "2.10× [2.10, 2.10]</b>" in html


@pytest.mark.parametrize("lines", [[], [a_line(steps=[])], [a_line(steps=[a_step([9], [-1], [0])])]])
def test_runs_with_nothing_to_show(lines):
    unexercised = judged("not_exercised", answers=len(lines), equal=len(lines))
    result = a_run(lines, lossless=unexercised, interrupted=True)
    page = Page(run_report(result))
    assert len(page.all("svg")) >= 5
    assert "interrupted" in run_report(result)
    Page(comparison_report([result, a_run()]))


# -- one generation ------------------------------------------------------------------------------------------------------


def test_the_timeline_holds_every_step():
    data = timeline(a_run())
    (answer,) = data["answers"]
    assert answer["steps"][0] == [[1, 4], [1, 2, 3, 4], [0, 0, 1, 1], [-0.5, -1.0, -1.5, -2.0], 9, 10.0]
    assert answer["steps"][1] == [[2], [1, 2, 3], [0, 0, 2], [-0.5, -1.0, -1.5], 9, 10.0]  # without its pad
    assert answer["prompt"] == " w1 w2"
    assert set(data["pieces"]) == {1, 2, 3, 4, 8, 9}
    assert timeline(a_run(pieces={1: ""}))["answers"][0]["prompt"] == "⟨1⟩⟨2⟩"  # a special token shows its id


def test_a_big_run_stays_small_and_says_what_it_left_out():
    long = [a_step([9] * 16, [-1, *range(15)], [0, 1], ms=1.0)] * 500
    lines = [a_line(i, long, "qa" if i < 50 else "math") for i in range(80)]
    html = run_report(a_run(lines))
    held = json.loads(html.split('id="timeline">')[1].split("</script>")[0])
    assert len(html.encode()) < 6e6
    assert 20 < len(held["answers"]) < 80
    assert {answer["kind"] for answer in held["answers"]} == {"qa", "math"}
    assert f"{len(held['answers'])} of 80 answers" in " ".join(html.split())
    cut = timeline(a_run([a_line(0, long)]), budget=20_000)["answers"][0]
    assert 20 <= len(cut["steps"]) < cut["count"] == 500


def test_answers_in_question_come_first():
    lines = [a_line(i) for i in range(40)]
    lossless = judged("violation", violations=[entry("verifier_bug", id=37)])
    held = timeline(a_run(lines, lossless=lossless), budget=500)["answers"]
    assert 37 in [answer["id"] for answer in held] and len(held) < 5


# -- comparisons ---------------------------------------------------------------------------------------------------------


def test_runs_are_named_by_what_varies():
    eagle = {"_target_": "specresearch.drafters.eagle.Eagle", "ckpt": "auto"}
    small = {"_target_": "specresearch.drafters.ngram.NGram", "max_n": 2}
    runs = [a_run(), a_run(config={"drafter": eagle}), a_run(config={"drafter": small}), a_run(folder="runs/again")]
    assert names(runs) == [
        "drafter=ngram drafter.max_n=3 one",
        "drafter=eagle",
        "drafter=ngram drafter.max_n=2",
        "drafter=ngram drafter.max_n=3 again",
    ]
    tracked = [a_run(config={"tracker": {"_target_": "a.B"}}, folder="a"), a_run(config={"tracker": None}, folder="b")]
    assert names(tracked) == ["a", "b"]  # how a run was tracked changes none of its numbers


def test_many_runs_are_told_apart():
    runs = [a_run(config={"seed": seed}) for seed in range(24)]
    assert len({subject.css for subject in subjects(runs)}) == 24
    page = Page(comparison_report(runs))
    assert len(page.all("button", aria_pressed="false")) == 0  # attributes keep their own names
    assert len([own for own in page.all("button") if "data-run" in own]) == 24


def test_what_hinders_a_comparison_is_said():
    other = a_run([a_line(5)], folder="runs/two", interrupted=True)
    other.summary["provenance"] = {"device": {"name": "another"}}
    html = comparison_report([a_run(), other])
    for words in ("did not answer the same questions", "different devices", "Interrupted"):
        assert words in html
    assert "did not answer" not in comparison_report([a_run(), a_run()])


# -- real runs of the tiny target ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A greedy and a sampled run, made by the command."""
    root = tmp_path_factory.mktemp("runs")
    greedy = ["drafter=ngram", "limit=3"]
    sampled = ["drafter=small_lm", "drafter.layers=1", "tree=chain", "temperature=0.8", "limit=3", "log=whitebox"]
    for name, arguments in (("greedy", greedy), ("sampled", sampled)):
        base = ["target=tiny", "tracker=none", "max_new_tokens=10", f"hydra.run.dir={root / name}"]
        assert call(*base, *arguments) == 0
    return root


def call(*arguments):
    before, sys.argv = sys.argv, ["specresearch", *arguments]
    try:
        with pytest.raises(SystemExit) as exit:
            cli.main()
    finally:
        sys.argv = before
    return exit.value.code


def test_a_run_writes_its_report_and_the_folder_gives_it_again(folders, capsys):
    for name in ("greedy", "sampled"):
        written = (folders / name / "report.html").read_bytes()
        assert command.main([str(folders / name)]) == 0
        assert (folders / name / "report.html").read_bytes() == written
        assert "report.html" in capsys.readouterr().out


def test_the_figures_agree_with_the_summary(folders):
    results = read(folders / "greedy")
    found, rates = tally(results.lines), results.summary["acceptance_rate_by_depth"]
    for depth, rate in enumerate(rates, 1):
        kept = sum(n for node, n in found.accepted.items() if len(node) == depth)
        assert kept / found.steps == pytest.approx(rate)
    drafted = sum(found.drafted.values())
    assert sum(found.accepted.values()) / drafted == pytest.approx(results.summary["acceptance_rate"])


def test_a_sampled_run_shows_its_evidence(folders):
    results = read(folders / "sampled")
    html = run_report(results)
    tokens = results.summary["lossless"]["tokens"]
    assert f"after {tokens:,} tokens: log10 E = {results.summary['lossless']['log10_e']:.2f}" in html
    assert "violation from here on" in html and "White box" in html
    assert "violation from here on" not in run_report(read(folders / "greedy"))


def test_report_false_writes_none_and_a_fault_in_drawing_loses_nothing(folders, tmp_path, monkeypatch, capsys):
    base = ["target=tiny", "tracker=none", "max_new_tokens=4", "drafter=ngram", "limit=1", "baseline=false"]
    assert call(*base, "report=false", f"hydra.run.dir={tmp_path}/off") == 0
    assert not (tmp_path / "off" / "report.html").exists()
    assert "report.html" not in capsys.readouterr().out

    def broken(results):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(cli, "write", broken)
    assert call(*base, f"hydra.run.dir={tmp_path}/broken") == 0
    out, err = capsys.readouterr()
    assert "warning: report.html was not written (ZeroDivisionError: no)" in err and "accepted length" in out
    assert (tmp_path / "broken" / "summary.json").exists()


def test_an_interrupted_run_has_a_report(tmp_path, monkeypatch):
    from specresearch.run import Run

    block = Run._block

    def tired(self, index):
        if index == 1:
            raise KeyboardInterrupt
        block(self, index)

    monkeypatch.setattr(Run, "_block", tired)
    base = ["target=tiny", "tracker=none", "max_new_tokens=4", "drafter=ngram", "limit=3", "baseline=false"]
    assert call(*base, f"hydra.run.dir={tmp_path}/cut") == 130
    assert "<strong>interrupted</strong>" in (tmp_path / "cut" / "report.html").read_text()


def test_several_runs_give_a_comparison(folders, tmp_path):
    assert command.main([str(folders / "greedy"), str(folders / "sampled"), f"out={tmp_path}/both.html"]) == 0
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    assert command.main([str(folders)]) == 0  # as a sweep's folder
    page = (folders / "report.html").read_text()
    assert len(find([folders])) == 2 and "2 runs compared" in page and "temperature=0.8" in page


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "no run is given"),
        (["nowhere"], "holds no run"),
        (["to=x.html", "nowhere"], "only out=FILE"),
        (["--out", "nowhere"], "no flag"),
        (["nowhere", "out="], "names no file"),
    ],
)
def test_mistakes_are_said_in_one_line(arguments, hint, capsys):
    assert command.main(arguments) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and hint in line


def test_a_place_that_cannot_be_written(folders, capsys):
    assert command.main([str(folders / "greedy"), "out=/proc/nowhere/r.html"]) == 1
    assert "cannot be written" in capsys.readouterr().err
