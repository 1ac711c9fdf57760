"""Spec-Bench: its questions in the order promised, its numbers by its own way and by ours, end to end on the tiny target."""

import json
import sys
from collections import Counter

import pytest
from spec_bench_lines import questions, write

from specresearch import cli, console
from specresearch.prompts.spec_bench import GROUPS, spec_bench
from specresearch.spec_bench import differ, measure, paired
from specresearch.types import UserError


def test_a_limit_takes_the_groups_alike(tmp_path):
    found = spec_bench(path=str(write(tmp_path / "q.jsonl", questions(4))))
    assert len(found) == 28
    for n in (1, 2, 4):
        assert Counter(q.kind for q in found[: 6 * n]) == dict.fromkeys(GROUPS, n)
    assert [q.id for q in found if q.kind == "mt_bench"] == [81, 85, 82, 86, 83, 87, 84, 88]  # its categories in turn
    assert [q.id for q in found if q.kind == "rag"] == [105, 106, 107, 108]


def test_no_group_always_meets_the_same_order_of_modes(tmp_path):
    """Blocks with even numbers are answered by the drafter first, the others plainly first."""
    found = spec_bench(path=str(write(tmp_path / "q.jsonl", questions(4))))
    even = Counter(q.kind for number, q in enumerate(found[:24]) if number % 2 == 0)
    assert even == dict.fromkeys(GROUPS, 2)


def test_another_file_is_refused_and_a_missing_one_says_where_to_get_it(tmp_path):
    for path in (None, str(tmp_path / "nowhere.jsonl")):
        with pytest.raises(UserError, match=r"hemingkx/Spec-Bench.*prompts.path=question.jsonl"):
            spec_bench(path=path)
    other = write(tmp_path / "q.jsonl", [{"question_id": 1, "category": "cooking", "turns": ["x"]}])
    with pytest.raises(UserError, match="1 has the category 'cooking'"):
        spec_bench(path=str(other))


def line(id, kind, turn, *lengths):
    steps = [{"emitted": n, "tokens": [0, 1, 2, 3], "parent": [-1, 0, 1, 2]} for n in lengths]
    return {"id": id, "kind": kind, "turn": turn, "output_ids": [0] * (1 + sum(lengths)), "steps": steps}


def block(answers, spec, base=None, retokenised=0):
    """`spec`, `base` = (tokens, seconds)"""
    modes = {"speculative": spec, **({"baseline": base} if base else {})}
    found = {mode: {"tokens": n, "seconds": s, "retokenised": n - 1} for mode, (n, s) in modes.items()}
    if base:
        found["baseline"]["retokenised"] = retokenised
    return {"answers": answers, **found}


LINES = [
    *(line(1, "mt_bench", 0, 3, 2), line(1, "mt_bench", 1, 1, 2)),
    line(2, "qa", 0, 4),
    line(3, "qa", 0, 1, 1, 1),
]
BLOCKS = [
    block(2, (10, 1.0), (10, 2.0), 8),
    block(1, (5, 0.5), (5, 1.0), 4),
    block(1, (4, 2.0), (4, 2.0), 3),
]


def test_numbers_by_both_ways():
    found = measure(LINES, BLOCKS)
    qa, overall = found["groups"]["qa"], found["overall"]
    assert (qa["questions"], qa["prompts"], overall["questions"], overall["prompts"]) == (2, 2, 3, 4)
    assert qa["mean_accepted_length"] == 7 / 4  # over steps, not over questions
    assert qa["tokens_per_second"] == 9 / 2.5
    assert qa["speedup"] == (9 / 2.5) / (9 / 3.0)
    assert qa["as_spec_bench"]["tokens_per_second"] == (5 / 0.5 + 4 / 2.0) / 2
    assert qa["as_spec_bench"]["baseline_tokens_per_second"] == (4 / 1.0 + 3 / 2.0) / 2
    assert qa["as_spec_bench"]["speedup"] == 6.0 / 2.75
    assert overall["speedup"] == 5.0 / 3.5
    assert overall["as_spec_bench"]["speedup"] == pytest.approx((10 + 10 + 2) / (4 + 4 + 1.5))
    assert found["recounted"] == {"tokens": 19, "retokenised": 15}
    assert differ(found)


def test_both_ways_agree_on_questions_of_one_length():
    blocks = [block(1, (10, 1.0), (10, 2.0), 10)] * 2
    found = measure([line(1, "qa", 0, 9), line(2, "rag", 0, 9)], blocks)
    assert not differ(found)
    assert found["overall"]["speedup"] == found["overall"]["as_spec_bench"]["speedup"] == 2.0


def test_what_was_not_measured_is_null():
    alone = measure(LINES, [block(2, (10, 1.0)), block(1, (5, 0.5)), block(1, (4, 2.0))])["overall"]
    assert alone["tokens_per_second"] == 19 / 3.5
    assert alone["speedup"] is alone["as_spec_bench"]["speedup"] is None
    several = measure(LINES, [block(4, (19, 3.5), (19, 5.0), 15)])  # one block of three questions
    assert several["overall"]["speedup"] is several["groups"]["qa"]["speedup"] is None
    assert several["overall"]["mean_accepted_length"] == 15 / 8
    assert not differ(several)
    some = measure(LINES, [BLOCKS[0], block(1, (5, 0.5)), BLOCKS[2]])["overall"]  # like is compared with like
    assert some["speedup"] == (14 / 3.0) / (14 / 4.0)


def test_a_run_of_plain_decoding_is_a_baseline():
    own, plain = [block(1, (10, 1.0))], [block(1, (10, 2.0))]
    assert measure([line(1, "qa", 0, 9)], paired(own, plain))["overall"]["speedup"] == 2.0


def test_the_table_shows_spec_benchs_way_where_it_differs(capsys):
    console.groups(measure(LINES, BLOCKS))
    text = capsys.readouterr().out
    assert "Spec-Bench's" in text.splitlines()[0]
    assert "1.20x" in text and "2.18x" in text and "15 for the 19 emitted" in text
    console.groups(measure(LINES, [b | {"baseline": b["speculative"]} for b in BLOCKS[:0]]))
    assert "Spec-Bench's" not in capsys.readouterr().out


@pytest.mark.parametrize("batch", [1, 3])
def test_a_run(tmp_path, monkeypatch, capsys, batch):
    """Two turns, the second with the first answer in its prompt; batches give the lengths, but no speeds by question."""
    path = write(tmp_path / "question.jsonl", questions(1))
    given = ["target=tiny", "drafter=ngram", "tracker=none", "prompts=spec_bench", f"prompts.path={path}", "limit=6"]
    given += ["max_new_tokens=6", f"batch_size={batch}", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["specresearch", *given])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert out.count("mt_bench") == 1 and "overall" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["by_kind"]) == list(GROUPS)
    found = summary["spec_bench"]
    assert (found["overall"]["questions"], found["overall"]["prompts"]) == (6, 7)
    assert found["overall"]["mean_accepted_length"] == summary["mean_accepted_length"]
    assert found["overall"]["speedup"] == (pytest.approx(summary["speedup"]) if batch == 1 else None)
    assert found["groups"]["qa"]["speedup"] == (
        pytest.approx(summary["by_kind"]["qa"]["speedup"]) if batch == 1 else None
    )
    lines = [json.loads(x) for x in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    first, second = (x for x in lines if x["kind"] == "mt_bench")
    assert second["turn"] == 1 and len(second["prompt_ids"]) > len(first["prompt_ids"]) + len(first["text"])
