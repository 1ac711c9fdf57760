"""Sweeps: one process and one target for all jobs, shared plain answers, failures told at the end, resumption, launchers."""

import gc
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import accept_all_drafts
from hydra import compose, initialize_config_dir
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from specresearch import cli, launchers, sweeps
from specresearch.baseline import Answers, interleaved
from specresearch.build import settings_of
from specresearch.decode import Decoder, Job
from specresearch.lossless.greedy import GreedyJudge
from specresearch.metrics import speed
from specresearch.models import tiny
from specresearch.models.hf import HFModel
from specresearch.overrides import CONF
from specresearch.prompts import Question, builtin
from specresearch.run import Run
from specresearch.sampling import Sampler

MODES = ("speculative", "baseline")
BASE = ["target=tiny", "drafter=ngram", "tracker=none", "max_new_tokens=4", "limit=2"]


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """`-m` in this process -> exit status, output, errors. A repeated key wins."""

    def call(*overrides: str, folder: str = "sweep"):
        given = ["-m", *BASE, *overrides]
        if not any(o.startswith("resume=") for o in given):
            given.append(f"hydra.sweep.dir={tmp_path}/{folder}")
        monkeypatch.setattr(sys, "argv", ["specresearch", *given])
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(cli.shared, "target", None)
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return call


def load(folder: Path):
    blocks = [json.loads(line) for line in (folder / "blocks.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), blocks


def jobs_of(folder: Path) -> list[str]:
    return [job.folder.name for job in sweeps.jobs(folder)]


# -- one process -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[5], pytest.param([5, 6, 7], marks=pytest.mark.slow)], ids=["4 jobs", "12 jobs"])
def test_jobs_leave_nothing_behind(sweep, monkeypatch, sizes):
    """Neither parts nor decoders nor tensors nor hooks nor memory grow with the number of jobs; the target is loaded once."""
    decode, make, loads, seen = cli.decode, tiny.load, [], []

    def counted(*args):
        result = decode(*args)
        gc.collect()
        things = gc.get_objects()
        alive = {kind.__name__: sum(type(x) is kind for x in things) for kind in (Decoder, Run, GreedyJudge, HFModel)}
        tensors = sum(issubclass(type(x), torch.Tensor) for x in things)
        model = loads[0].model
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seen.append((alive, tensors, hooks, resident))
        return result

    monkeypatch.setattr(tiny, "load", lambda **keys: loads.append(make(**keys)) or loads[-1])
    monkeypatch.setattr(cli, "decode", counted)
    drafters = ["drafter=small_lm", "drafter.layers=1", "limit=1", "max_new_tokens=2"]
    status, *_ = sweep(*drafters, "tree.topk=1,2,3,4", f"tree.size={','.join(map(str, sizes))}")
    assert status == 0 and len(seen) == 4 * len(sizes)
    assert len(loads) == 1
    first, last = seen[1], seen[-1]  # what is made once is there after the first job
    assert first[:3] == last[:3]
    assert last[3] - first[3] < 20e6


def test_hooks_go_with_the_model_that_set_them(target):
    before = [len(target.head._forward_pre_hooks), len(target.blocks[0]._forward_hooks)]
    early = target.first_layers(1)
    assert len(target.head._forward_pre_hooks) > before[0]
    del early
    gc.collect()
    assert [len(target.head._forward_pre_hooks), len(target.blocks[0]._forward_hooks)] == before


def test_another_target_is_loaded_anew(sweep, monkeypatch):
    made, loads = tiny.load, []
    monkeypatch.setattr(tiny, "load", lambda **keys: loads.append(keys) or made(**keys))
    assert sweep("target.seed=0,1", "tree.topk=1,2", "limit=1")[0] == 0
    assert [keys["seed"] for keys in loads] == [0, 1]


# -- plain answers ---------------------------------------------------------------------------------------------------------


def test_ids_are_reused_and_times_are_not(sweep, tmp_path):
    assert sweep("limit=12", "tree.topk=1,2", "max_new_tokens=6")[0] == 0
    (first, every), (second, some) = (load(tmp_path / "sweep" / number) for number in "01")
    assert first["baseline_prompts"] == second["baseline_prompts"] == 8
    timed = [block for block in some if "baseline" in block]
    assert [block["block"] for block in timed] == [block["block"] for block in every if "baseline" in block], "the same"
    assert len(timed) == 8 and {kind for block in timed for kind in block["kinds"]} == set(second["by_kind"])
    assert second["lossless"]["equal"] == second["lossless"]["answers"] == 12, "all answers are judged"
    spec, plain = (sum(b[m]["tokens"] for b in timed) / sum(b[m]["seconds"] for b in timed) for m in MODES)
    assert second["speedup"] == pytest.approx(spec / plain), "the same prompts above and below"
    assert second["baseline_tokens_per_second"] == pytest.approx(plain)
    assert len(list((tmp_path / "sweep" / "baseline").iterdir())) == 12


def test_a_reused_answer_that_differs_is_seen(sweep, tmp_path):
    """The check reads what was kept: an answer that was tampered with is a violation of the jobs that reuse it."""
    assert sweep("limit=12", "tree.topk=1", "max_new_tokens=6")[0] == 0
    for path in (tmp_path / "sweep" / "baseline").iterdir():
        kept = json.loads(path.read_text())
        path.write_text(json.dumps(kept | {"output_ids": [(i + 1) % 256 for i in kept["output_ids"]]}))
    assert sweep("limit=12", "tree.topk=2", "max_new_tokens=6")[0] == 0, "another run in the folder: its ids are equal"
    found = load(tmp_path / "sweep" / "0")[0]["lossless"]
    assert found["equal"] < found["answers"]


OTHERS = ["seed=1", "temperature=1", "stop=[zz]", "batch_size=2", "kernels=torch", "target.revision=b", "top_p=0.5"]


def origin(tmp_path: Path, target: HFModel, *given: str) -> str:
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose("config", ["target=hf", "target.id=x", *given])
    parts = SimpleNamespace(target=target, sampler=Sampler())
    return cli.plain_answers(cfg, parts, settings_of(cfg), tmp_path).origin


def test_what_an_answer_depends_on_is_in_its_name(tmp_path, target):
    """... and nothing else is."""
    same = [(), ("tree.topk=1",), ("drafter=ngram",), ("limit=3",), ("tree=chain",), ("check=false",)]
    assert len({origin(tmp_path, target, *given) for given in same}) == 1
    assert len({origin(tmp_path, target, *given) for given in [(), *((other,) for other in OTHERS)]}) == 1 + len(OTHERS)
    narrow, another = (tiny.load(device="cpu", **keys) for keys in ({}, {"dtype": "float64", "seed": 1}))
    assert len({model.fingerprint() for model in (target, narrow, another)}) == 3
    assert tiny.load(dtype="float64", device="cpu").fingerprint() == target.fingerprint()


def test_second_turns_and_batches_are_recalled(sweep, tmp_path):
    talk = tmp_path / "talk.jsonl"
    lines = [json.dumps({"id": i, "turns": [f"Say {i}.", "And now?"]}) for i in range(10)]
    talk.write_text("\n".join(lines))
    sampled = ["temperature=0,1", "verifier=sample_and_match", "batch_size=2", "limit=null", "tree.topk=1,2"]
    assert sweep("prompts=file", f"prompts.path={talk}", *sampled)[0] == 0
    for number in "13":
        summary, blocks = load(tmp_path / "sweep" / number)
        assert summary["baseline_prompts"] == 16 < summary["prompts"] == 20
        assert sum("baseline" in block for block in blocks) == 2
        assert summary["lossless"]["verdict"] != "violation"
        assert number == "3" or summary["lossless"]["equal"] == 20


def test_an_answer_is_recalled_whole_or_not_at_all(tmp_path):
    store = Answers(tmp_path / "kept", ["a target"])
    line = {"id": 3, "turn": 0, "prompt_ids": [1, 2], "output_ids": [5], "text": "x", "finish": "length"}
    store.keep([line], {(3, 0): 1})
    (path,) = (tmp_path / "kept").iterdir()
    whole = path.read_text()

    class Jobs(list):
        def answered(self, turn):
            self.done = turn

    job = Job(3, "kind", 0, [1, 2], 1)
    assert store.recall(Jobs([job]))[0]["output_ids"] == [5]
    assert Answers(tmp_path / "kept", ["another"]).recall(Jobs([job])) is None
    assert store.recall(Jobs([replace(job, budget=2)])) is None
    path.write_text(whole[:10])
    assert store.recall(Jobs([job])) is None


def test_the_timed_prompts_are_of_all_kinds():
    """Evenly spaced ones would be of one kind where the kinds come in turn."""
    chosen = interleaved([[q] for q in builtin()])
    assert len(chosen) == 8
    assert {builtin()[i].kind for i in chosen} == {q.kind for q in builtin()}
    assert max(chosen) > 28, "and from all parts of the run"
    batches = [[Question(i, "a", ("x",))] * 8 for i in range(5)]
    assert len(interleaved(batches)) == 2
    assert interleaved([[q] for q in builtin()[:3]]) == {0, 1, 2}


def test_speedup_compares_the_blocks_that_were_timed_both_ways():
    slow = {"tokens": 10, "seconds": 10.0, "target_passes": 1}
    fast = {"tokens": 10, "seconds": 1.0, "target_passes": 1}
    blocks = [{"answers": 1, "speculative": slow}, {"answers": 2, "speculative": fast, "baseline": fast, "hf": slow}]
    found = speed(blocks)
    assert (found["speedup"], found["hf_speedup"], found["baseline_prompts"]) == (1.0, 10.0, 2)
    assert found["tokens_per_second"] == pytest.approx(20 / 11)


# -- the end of a sweep ----------------------------------------------------------------------------------------------------


def test_failures_are_told_at_the_end(sweep, tmp_path, monkeypatch):
    """A mistake of the user's and a fault of the program: both jobs fail, the others do not."""
    step, fault = Decoder._step, RuntimeError("out of\nmemory")

    def broken(self):
        if self.parts.policy.size == 6:
            raise fault
        return step(self)

    monkeypatch.setattr(Decoder, "_step", broken)
    status, out, err = sweep("tree.depth=4", "tree.size=3,5,6,7")
    assert status == 1
    lines = err.splitlines()
    failed = [line for line in lines if line.startswith("failed: ")]
    assert [line.split(": ")[1] for line in failed] == ["job 0 tree.size=3", "job 2 tree.size=6"]
    assert "tree.size=5 or more" in failed[0]
    assert "RuntimeError: out of memory" in failed[1]
    assert "2 of 4 jobs done" in out
    table = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [job["state"] for job in table["jobs"]] == ["failed", "done", "failed", "done"]
    assert table["varied"] == ["tree.size"]
    again = shlex.split(next(line for line in lines if line.startswith("go on with")))
    assert again[-1] == f"resume={tmp_path}/sweep" and "tree.size=3,5,6,7" in again


def test_the_table_marks_what_is_lossy_and_a_violation_is_status_2(sweep, monkeypatch):
    lossy = [
        "verifier=target_only",
        "verifier.threshold_acc=0.5,1",
        "lossy=allow",
        "max_new_tokens=12",
        "drafter.min_n=1",
    ]
    status, out, _ = sweep(*lossy, "objective=mean_accepted_length")
    rows = out[out.index("2 of 2 jobs done") :].splitlines()
    assert status == 0
    assert [re.search("LOSSY|lossless|not_exercised", row)[0] for row in rows[2:4]] == ["LOSSY", "lossless"]
    assert "verifier.threshold_acc" in rows[1]
    accept_all_drafts(monkeypatch)
    status, out, _ = sweep("drafter.min_n=1,2", "limit=4", "max_new_tokens=12", folder="bad")
    assert status == 2 and "VIOLATION" in out


def test_the_best_is_said_with_its_command_line(sweep, tmp_path):
    status, out, _ = sweep("tree.topk=1,2", "objective=mean_accepted_length")
    assert status == 0
    line = next(line for line in out.splitlines() if line.startswith("best mean_accepted_length"))
    command = shlex.split(line[line.index("python") :])
    top = max(sweeps.jobs(tmp_path / "sweep"), key=lambda job: job.summary["mean_accepted_length"])
    assert f"tree.topk={top.overrides['tree.topk']}" in command
    assert not any(word.startswith(("objective", "hydra")) for word in command)


def test_objectives_that_cannot_be(sweep):
    status, _, err = sweep("objective=speedup", "baseline=false", "tree.topk=1,2")
    assert status == 1 and "leave baseline=false out" in err


# -- going on --------------------------------------------------------------------------------------------------------------


def test_resume_skips_what_is_done_and_adds_what_is_new(sweep, tmp_path, monkeypatch):
    folder, decode, ran = tmp_path / "sweep", cli.decode, []
    assert sweep("tree.topk=1,2")[0] == 0
    before = (folder / "1" / "summary.json").read_text()

    def noted(cfg, where, *rest):
        ran.append((where.name, cfg.tree.topk))
        return decode(cfg, where, *rest)

    monkeypatch.setattr(cli, "decode", noted)
    status, out, _ = sweep("tree.topk=2,1,3", f"resume={folder}")
    assert status == 0
    assert ran == [("4", 3)], "only what is new, under a new number"
    assert out.count("skipped") == 2
    assert (folder / "1" / "summary.json").read_text() == before
    assert jobs_of(folder) == ["0", "1", "4"]
    assert "3 of 3 jobs done" in out
    assert sweep("tree.topk=2", "seed=5", f"resume={folder}")[0] == 0
    assert ran[1:] == [("5", 2)], "another seed is another configuration"


def test_a_job_broken_off_before_it_began_or_damaged_is_made_anew(sweep, tmp_path):
    folder = tmp_path / "sweep"
    assert sweep("tree.topk=1,2,3")[0] == 0
    (folder / "0" / "config.yaml").unlink()  # Ctrl-C while the model was loaded: Hydra's files alone
    for path in (folder / "0").glob("*.json*"):
        path.unlink()
    whole = (folder / "1" / "summary.json").read_text()
    (folder / "1" / "summary.json").write_text(whole[: len(whole) // 2])
    status, out, err = sweep("tree.topk=1,2,3", f"resume={folder}")
    assert status == 0 and "3 of 3 jobs done" in out, err
    assert out.count("skipped") == 1 and jobs_of(folder) == ["0", "1", "2"]
    assert load(folder / "1")[0]["prompts"] == load(folder / "0")[0]["prompts"] == 2


def test_interrupted_and_failed_jobs_are_taken_up(sweep, tmp_path, monkeypatch):
    folder, step, calls = tmp_path / "sweep", Decoder._step, []

    def tired(self):
        calls.append(self.parts.policy.width)
        if calls.count(2) == 5:
            raise KeyboardInterrupt
        return step(self)

    given = ["tree.size=3,8", "tree.topk=1,2", "limit=3", "max_new_tokens=8"]
    monkeypatch.setattr(Decoder, "_step", tired)
    status, out, err = sweep("tree.size=8", "tree.topk=1,2,3", "limit=3", "max_new_tokens=8")
    assert status == 130
    assert "1 of 2 jobs done" in out and "unfinished: job 1 tree.topk=2" in err
    assert f"resume={folder}" in err
    assert err.count("go on with") == 1, "one line says how to go on, not one for the job too"
    monkeypatch.setattr(Decoder, "_step", step)
    status, out, _ = sweep(*given[2:], "tree.size=8", "tree.topk=1,2,3", f"resume={folder}")
    assert status == 0
    assert jobs_of(folder) == ["0", "1", "4"], "the one that was interrupted keeps its folder"
    assert load(folder / "1")[0]["prompts"] == 3
    assert "3 of 3 jobs done" in out


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["-m", "resume=nowhere"], "no sweep was started"),
        (["-m", "resume=sweep/0"], "leave -m out"),
        (["resume=sweep"], "add -m"),
        (["-m", "resume=sweep", "hydra.sweep.dir=x"], "leave hydra.sweep.dir=x out"),
        (["-m", "hydra/launcher=jobli"], "joblib"),
        (["-m", "hydra/sweeper=optuna", "tree.topk=1,2"], "add objective="),
        (["-m", "hydra/sweeper=optun"], "optuna"),
    ],
)
def test_mistakes_about_sweeps_get_one_line(sweep, tmp_path, monkeypatch, capsys, given, hint):
    (tmp_path / "sweep" / "0" / ".hydra").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["specresearch", *given])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert exit.value.code == 1 and hint in line


@pytest.mark.parametrize(
    ("group", "extra"),
    [
        ("hydra/launcher/joblib", "joblib"),
        ("hydra/launcher/submitit_local", "submitit"),
        ("hydra/launcher/submitit_slurm", "submitit"),
        ("hydra/launcher/ray", "ray"),
        ("hydra/sweeper/optuna", "optuna"),
    ],
)
def test_a_missing_plugin_names_its_extra(sweep, group, extra):
    from hydra.errors import HydraException

    assert f"pip install 'specresearch[{extra}]'" in cli.sentence(HydraException(f"Could not find '{group}'"))
    kind = group.split("/")[1]
    if importlib.util.find_spec("hydra_plugins") is None or not importlib.util.find_spec(plugin_of(extra, kind)):
        place, _, option = group.rpartition("/")
        status, _, err = sweep(f"{place}={option}", "objective=tokens_per_second")
        (line,) = err.strip().splitlines()
        assert status == 1 and f"pip install 'specresearch[{extra}]'" in line


def test_wandb_runs_of_a_sweep_are_one_group_and_closed(sweep, tmp_path):
    import wandb
    from wandb_file import read_records

    assert sweep("tracker=wandb", "tree.topk=1,2", "limit=1")[0] == 0
    assert wandb.run is None
    wandb.teardown()
    paths = sorted(tmp_path.glob("sweep/*/wandb/offline-run-*/*.wandb"))
    records = [record for path in paths for record in read_records(path)]
    runs = {(r.run.run_group, r.run.job_type) for r in records if r.HasField("run")}
    assert len(paths) == 2 and runs == {("sweep", "sweep")}
    assert sum(r.HasField("exit") for r in records) == 2


# -- launchers and sweepers ------------------------------------------------------------------------------------------------

LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=2"],
    "ray": ["hydra/launcher=ray", "+hydra.launcher.ray.remote.num_cpus=1", "+hydra.launcher.ray.init.num_cpus=2"],
}


def command(tmp_path: Path, *given: str, **options):
    place = [] if any(text.startswith("resume=") for text in given) else [f"hydra.sweep.dir={tmp_path}/sweep"]
    line = [sys.executable, "-m", "specresearch", "-m", *BASE, *place, *given]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def plugin_of(extra: str, kind: str) -> str:
    return f"hydra_plugins.hydra_{extra}_{kind}"


def installed(extra: str, kind: str = "launcher") -> None:
    if importlib.util.find_spec("hydra_plugins") is None or not importlib.util.find_spec(plugin_of(extra, kind)):
        pytest.skip(f"pip install 'specresearch[{extra}]'")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(tmp_path, launcher):
    """Jobs in other processes: they find each other's answers, failures and results are told by the one that started them."""
    installed(launcher)
    first = command(tmp_path, *LAUNCHERS[launcher], "limit=10", "tree.size=3,8", "tree.topk=1,2")
    out, err = first.communicate(timeout=400)
    assert first.returncode == 1, out + err
    assert "2 of 4 jobs done" in out
    assert len([line for line in err.splitlines() if line.startswith("failed: ")]) == 2
    again = command(
        tmp_path, *LAUNCHERS[launcher], "limit=10", "tree.size=8", "tree.topk=1,2,3", f"resume={tmp_path}/sweep"
    )
    out, err = again.communicate(timeout=400)
    assert again.returncode == 0, out + err  # earlier failures are shown, and were not tried again
    assert "3 of 5 jobs done" in out, out + err
    newest = sweeps.jobs(tmp_path / "sweep")[-1].summary
    assert (newest["baseline_prompts"], newest["prompts"]) == (8, 10)


@pytest.mark.slow
def test_optuna(tmp_path):
    installed("optuna", "sweeper")
    tune = ["experiment=tune", "limit=2", "max_new_tokens=4", "hydra.sweeper.n_trials=5"]
    process = command(tmp_path, *tune)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    assert "5 of 5 jobs done" in out
    found = sweeps.jobs(tmp_path / "sweep")
    top = max(found, key=lambda job: job.summary["tokens_per_second"])
    assert f"tree.depth={top.overrides['tree.depth']}" in out[out.index("best tokens_per_second") :]


@pytest.mark.slow
def test_ctrl_c_in_a_sweep(tmp_path):
    process = command(tmp_path, "tree.topk=1,2,3", "limit=8", "max_new_tokens=20")
    deadline, trace = time.time() + 300, tmp_path / "sweep" / "1" / "trace.jsonl"
    while not (trace.exists() and trace.read_text()) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "1 of 2 jobs done" in out
    assert "go on with  python -m specresearch -m" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joblib", "submitit_local", "submitit_slurm", "ray"])
def test_launchers_take_our_defaults(name):
    from specresearch.overrides import prepare

    installed(name.partition("_")[0])
    setup_globals()
    with initialize_config_dir(CONF, version_base="1.3"):
        given = prepare(["target=tiny", f"hydra/launcher={name}"])
        cfg = compose("config", given, return_hydra_config=True)
    assert len(given) > 2
    for key, _, value in (text.lstrip("+").partition("=") for text in given[2:]):
        assert str(OmegaConf.select(cfg, key)).lower() == value


def test_what_the_user_says_of_a_launcher_wins():
    given = ["hydra/launcher=ray", "+hydra.launcher.ray.remote.num_cpus=1", "tree.topk=1"]
    ours = launchers.defaults(given)
    assert ours and not any("num_cpus" in text for text in ours)
    assert launchers.defaults(["tree.topk=1"]) == []
    both = launchers.defaults(["hydra/launcher=submitit_local", "hydra/sweeper=optuna"])
    assert "hydra.sweeper.direction=maximize" in both and not any("max_batch_size" in text for text in both)
