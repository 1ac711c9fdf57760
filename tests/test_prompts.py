"""Benchmarks from local files, in the formats in which they are published."""

import gzip
import json

import datasets
import pytest
from hydra import compose, initialize_config_dir

from specresearch import prompts
from specresearch.build import make
from specresearch.overrides import CONF
from specresearch.types import UserError

HUMANEVAL = [
    {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}(x):\n", "canonical_solution": "", "test": ""} for i in (0, 1)
]
GSM8K = [{"question": f"How many is {i} + 1?", "answer": f"#### {i + 1}"} for i in (0, 1)]
MT_BENCH = [
    {"category": category, "prompt": ["One?", "Two?"], "reference": [], "prompt_id": i}
    for i, category in enumerate(("writing", "stem"))
]
FASTCHAT = [{"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}]


def read(option, path, *more):
    with initialize_config_dir(CONF, version_base="1.3"):
        return make(compose("config", [f"prompts={option}", f"prompts.path={path}", *more]), "prompts")


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_humaneval_as_openai_publishes_it(tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(lines(HUMANEVAL)))
    found = read("humaneval", path)
    assert [(q.kind, q.turns) for q in found] == [("humaneval", (row["prompt"],)) for row in HUMANEVAL]


def test_gsm8k_as_a_file_and_as_a_saved_dataset(tmp_path):
    (tmp_path / "test.jsonl").write_bytes(lines(GSM8K))
    rows = datasets.Dataset.from_list(GSM8K)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows.select([0]), "test": rows}).save_to_disk(tmp_path / "all")
    rows.to_parquet(tmp_path / "test.parquet")
    for name in ("test.jsonl", "one", "all", "test.parquet"):
        assert [(q.kind, q.turns) for q in read("gsm8k", tmp_path / name)] == [
            ("gsm8k", (row["question"],)) for row in GSM8K
        ]
    with pytest.raises(UserError, match=r"prompts.split=dev is not in .*: it has train, test"):
        read("gsm8k", tmp_path / "all", "prompts.split=dev")


@pytest.mark.parametrize("rows", [MT_BENCH, FASTCHAT], ids=["hub", "fastchat"])
def test_mt_bench_has_two_turns_and_its_categories(rows, tmp_path):
    (tmp_path / "question.jsonl").write_bytes(lines(rows))
    found = read("mt_bench", tmp_path / "question.jsonl")
    assert [(q.kind, q.turns) for q in found] == [(row["category"], ("One?", "Two?")) for row in rows]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.jsonl", "nowhere.jsonl is missing"),
        ("empty", "is no folder that datasets' save_to_disk wrote"),
        ("text.txt", "use a file that ends in .jsonl"),
        ("broken.jsonl", "the dataset cannot be loaded"),
        ("other.jsonl", "has no column question: it has prompt"),
        ("blank.jsonl", "row 0: the prompt is empty"),
    ],
)
def test_mistakes_are_one_line(name, says, tmp_path):
    (tmp_path / "empty").mkdir()
    for file, content in {
        **{"text.txt": b"x", "broken.jsonl": b"{{{", "other.jsonl": b'{"prompt": "x"}\n'},
        "blank.jsonl": b'{"question": " "}\n',
    }.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        read("gsm8k", tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, capfd):
    def unreachable(*args, **kwargs):
        import logging

        logging.getLogger("huggingface_hub.utils._http").warning("thrown while requesting HEAD")
        raise ConnectionError("Couldn't reach\n'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for option in ("gsm8k", "humaneval", "mt_bench"):
        with pytest.raises(UserError, match=r"cannot be loaded: Couldn't reach 'openai.*prompts.path=FILE"):
            read(option, "null")
    with pytest.raises(UserError, match="cannot be loaded"):
        prompts.hf(id="x", name=None, split="test", field="prompt", kind=None)
    assert capfd.readouterr().err == ""
