"""Several processes, one run: a target over two ranks, questions over two ranks, and what happens when a rank dies."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import Ended, launch
from transformers import LlamaConfig

from specresearch import parallel, shards
from specresearch.models import tiny
from specresearch.models.fast import FastForward
from specresearch.models.hf import HFModel
from specresearch.models.sharded import require_divides
from specresearch.run import Run
from specresearch.types import UserError

OWN = ("target=tiny", "target.dtype=float64", "tracker=none", "report=false", "max_new_tokens=24", "tree.depth=2")
EARLY_EXIT = ("drafter=small_lm", "drafter.layers=1", "tree.topk=6", "tree.size=16")
SAMPLED = ("drafter=small_lm", "drafter.layers=1", "tree=chain", "temperature=0.9", "batch_size=2")


def run(folder: Path, *given: str, where: str = "run", **how) -> Ended:
    return launch(folder, *OWN, *given, f"hydra.run.dir={folder / where}", **how)


def answers(folder: Path) -> list[list[int]]:
    return [json.loads(line)["output_ids"] for line in (folder / "trace.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def blocks(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "blocks.jsonl").read_text().splitlines()]


def moved(folder: Path) -> int:
    """Accepted nodes whose K and V lay elsewhere in the cache: ranks that miss the verdict go on from others."""
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return sum(node != place for line in lines for step in line["steps"] for place, node in enumerate(step["path"]))


def noise(rank: int) -> None:
    """Rank 1 computes other logits, of the target as of the drafter: far more than rounding, so that a short run shows it.
    No rank may fall back from our own forward to transformers'."""
    HFModel._check = lambda self: pytest.fail("our own forward does not serve")
    if rank == 0:
        return
    right = HFModel.run

    def wrong(self, *args, **kwargs):
        logits, features = right(self, *args, **kwargs)
        return logits + torch.randn_like(logits), features

    HFModel.run = wrong


def unled(rank: int) -> None:
    """No broadcasts: every rank drafts, verifies and decides by itself, as replicas without a leader do."""
    group = parallel.Group
    group.order = group._send = group.follow = group.wait_for_goodbyes = lambda *_, **__: None
    if rank:
        sys.argv[-1] += "-of-rank-1"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[tuple[str, ...], list[list[int]]]:
    """The answers of one process."""
    found = {}
    for given in (EARLY_EXIT, SAMPLED):
        folder = tmp_path_factory.mktemp("alone")
        assert run(folder, *given, "limit=5", "baseline=false", "check=false", world=1).statuses == [0]
        found[given] = answers(folder / "run")
    return found


# -- tensor parallel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [EARLY_EXIT, SAMPLED], ids=["greedy tree", "sampled chain, batched"])
def test_rank_0_decides_whatever_another_rank_computes(tmp_path, alone, given):
    ended = run(tmp_path, "target.tp=2", *given, "limit=4", "baseline=false", plant=noise)
    assert ended.statuses == [0, 0], ended.outputs
    assert answers(tmp_path / "run") == alone[given][:4]
    assert summary(tmp_path / "run")["lossless"]["verdict"] in ("lossless", "consistent")
    assert ended.outputs[1] == "" and "losslessness" in ended.outputs[0]
    if given == EARLY_EXIT:
        assert moved(tmp_path / "run"), "no accepted node had to move in the cache, so a lost verdict would go unseen"


def test_without_broadcasts_such_ranks_part(tmp_path, alone):
    """The same fault without the leader; without the fault, ranks without a leader get through."""
    given = ("target.tp=2", *EARLY_EXIT, "limit=2", "baseline=false", "check=false")

    def both(rank):
        parallel.PASS = timedelta(seconds=5)
        noise(rank)
        unled(rank)

    parted = run(tmp_path, *given, plant=both, where="parted")
    assert parted.statuses != [0, 0] or answers(tmp_path / "parted") != answers(tmp_path / "parted-of-rank-1")
    equal = run(tmp_path, *given, plant=unled, where="equal")
    assert equal.statuses == [0, 0], equal.outputs
    assert answers(tmp_path / "equal") == answers(tmp_path / "equal-of-rank-1") == alone[EARLY_EXIT][:2]


@pytest.mark.slow
def test_transformers_own_forward_is_split_too(tmp_path, alone):
    def plant(rank):
        FastForward.serves = staticmethod(lambda model: False)

    ended = run(tmp_path, "target.tp=2", *EARLY_EXIT, "limit=2", "baseline=false", plant=plant)
    assert ended.statuses == [0, 0], ended.outputs
    assert answers(tmp_path / "run") == alone[EARLY_EXIT][:2]


def test_a_rank_that_dies_in_a_pass_is_reported(tmp_path):
    def plant(rank):
        right, passes = HFModel.run, [0]

        def dies(self, *args, **kwargs):
            passes[0] += 1
            if rank and passes[0] == 60:
                os._exit(7)
            return right(self, *args, **kwargs)

        HFModel.run = dies

    ended = run(tmp_path, "target.tp=2", "drafter=ngram", "limit=40", "baseline=false", "check=false", plant=plant)
    assert ended.statuses == [1, 7], ended.outputs
    assert "error: rank 1 of 2 has ended, and the run with it" in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]
    assert 1 <= len(blocks(tmp_path / "run")) < 40


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_pass_is_given_up(tmp_path):
    def plant(rank):
        parallel.PASS = timedelta(seconds=5)
        if rank:
            HFModel.commit = lambda *_: (time.sleep(15), os._exit(7))

    ended = run(tmp_path, "target.tp=2", "drafter=ngram", "limit=1", "baseline=false", plant=plant)
    assert ended.statuses == [1, 7], ended.outputs
    assert "error: a rank has been silent for 5 s" in ended.outputs[0]


@pytest.mark.slow
def test_an_error_of_another_rank_is_said(tmp_path):
    def plant(rank):
        if rank:
            HFModel.commit = lambda *_: 1 // 0

    ended = run(tmp_path, "target.tp=2", "drafter=ngram", "limit=1", "baseline=false", plant=plant)
    assert ended.statuses == [1, 1], ended.outputs
    assert "error: rank 1: ZeroDivisionError" in ended.outputs[1]


def test_ctrl_c_of_a_spread_target(tmp_path):
    sent = []

    def press(pids):
        if not sent and (tmp_path / "run" / "blocks.jsonl").exists() and len(blocks(tmp_path / "run")) >= 2:
            sent.append([os.kill(pid, signal.SIGINT) for pid in pids * 2])  # torchrun repeats the terminal's

    ended = run(tmp_path, "target.tp=2", "drafter=ngram", "check=false", "baseline=false", meanwhile=press)
    assert ended.statuses == [130, 0], ended.outputs
    again = f"go on with  torchrun --nproc-per-node=2 -m specresearch resume={tmp_path / 'run'}"
    assert summary(tmp_path / "run")["interrupted"] and again in ended.outputs[0]


def test_heads_that_do_not_divide_are_refused_in_one_line(tmp_path):
    ended = run(tmp_path, "target.tp=3", "drafter=ngram", "limit=1", world=3)
    assert ended.statuses == [1, 0, 0]
    line = "error: tiny has 4 heads and 4 KV heads and 32 MLP columns, which target.tp=3 does not divide: use target.tp=2|4"
    assert ended.outputs == [line + "\n", "", ""]
    smollm2 = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    require_divides(smollm2, 3, "smollm2")
    with pytest.raises(UserError, match=r"9 heads and 3 KV heads, which target.tp=2 does not divide: use target.tp=3$"):
        require_divides(smollm2, 2, "smollm2")
    with pytest.raises(UserError, match="it cannot be split"):
        require_divides(
            LlamaConfig(hidden_size=56, num_attention_heads=7, num_key_value_heads=7, intermediate_size=32), 7, "odd"
        )


@pytest.mark.parametrize("tp", [0, "two", True, 1.5])
def test_no_number_of_processes(tp):
    with pytest.raises(UserError, match=r"target.tp=.*use the number of processes"):
        tiny.load(tp=tp)


def test_one_process_cannot_share():
    with pytest.raises(
        UserError, match=r"target.tp=2 and this is one process: start it with  torchrun --nproc-per-node=2"
    ):
        tiny.load(tp=2)


@pytest.mark.parametrize(
    ("arguments", "command", "says"),
    [
        (["tree.topk=1"], "certify", "runs in one process"),
        (["-m", "tree.topk=1,2"], "config", r"use  torchrun --nproc-per-node=2 -m specresearch target.tp=2 -m"),
        (["-m", "target.tp=2", "hydra/launcher=joblib"], "config", "leave hydra/launcher out"),
    ],
)
def test_what_several_processes_cannot_do(arguments, command, says):
    class Two:
        world = 2

    with pytest.raises(UserError, match=says):
        shards.require_supported(arguments, command, Two())


# -- data parallel -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [EARLY_EXIT, SAMPLED], ids=["greedy tree", "sampled chain, batched"])
def test_questions_over_two_ranks_are_one_run(tmp_path, alone, given):
    ended = run(tmp_path, *given, "limit=5")
    assert ended.statuses == [0, 0], ended.outputs
    made = tmp_path / "run"
    assert answers(made) == alone[given]
    assert [block["block"] for block in blocks(made)] == [*range(len(blocks(made)))]
    assert {block["rank"] for block in blocks(made)} == {0, 1}
    found = summary(made)
    assert found["prompts"] == 5 and found["lossless"]["verdict"] in ("lossless", "consistent")
    assert found["data_parallel"]["ranks"] == 2 and found["data_parallel"]["tokens_per_second"] > 0
    assert not list(made.glob("rank-*")) and ended.outputs[1] == ""


def test_a_dead_rank_is_reported_and_the_run_goes_on_with_what_is_left(tmp_path, alone):
    def plant(rank):
        right = Run._block

        def dies(self, index):
            if rank and index >= 3:
                os._exit(7)
            right(self, index)

        Run._block = dies

    given = (*EARLY_EXIT, "limit=5", "baseline=false", "check=false")
    ended = run(tmp_path, *given, plant=plant)
    assert ended.statuses == [1, 7], ended.outputs
    assert "error: rank 1 of 2 has ended" in ended.outputs[0]
    assert "finished answers are kept" in ended.outputs[0] and "torchrun" in ended.outputs[0]
    kept = {block["block"] for block in blocks(tmp_path / "run")}
    assert 1 in kept and 3 not in kept and kept < {*range(5)}
    ended = launch(tmp_path, f"resume={tmp_path / 'run'}")
    assert ended.statuses == [0, 0], ended.outputs
    assert answers(tmp_path / "run") == alone[EARLY_EXIT]


def test_ctrl_c_of_a_shared_run_keeps_what_both_have_finished(tmp_path):
    made, sent = tmp_path / "run", []

    def press(pids):
        own = [made, made / "rank-1"]
        if not sent and all((part / "blocks.jsonl").exists() and blocks(part) for part in own):
            sent.append([os.kill(pid, signal.SIGINT) for pid in pids])

    ended = run(tmp_path, "drafter=ngram", "baseline=false", "check=false", "max_new_tokens=40", meanwhile=press)
    assert ended.statuses == [130, 0], ended.outputs
    assert {block["rank"] for block in blocks(made)} == {0, 1}
    assert summary(made)["prompts"] == len(answers(made)) < 56


# -- torchrun itself -----------------------------------------------------------------------------------------------------------


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen:
    start = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "specresearch", *arguments]
    with (folder / "said").open("w") as said:
        return subprocess.Popen([sys.executable, *start], stdout=said, stderr=said, cwd=Path(__file__).parents[1])


def when(done, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["target.tp=2", "target.tp=1"])
@pytest.mark.parametrize("end", ["dead", "interrupted"])
def test_torchrun_ends_soon_and_keeps_what_is_finished(tmp_path, how, end):
    made = tmp_path / "run"
    given = (*OWN, how, "drafter=ngram", "baseline=false", "check=false", "max_new_tokens=100")
    group = torchrun(tmp_path, *given, f"hydra.run.dir={made}")
    when(lambda: (made / "blocks.jsonl").exists() and blocks(made))
    began = time.monotonic()
    if end == "dead":
        os.kill(children(group.pid)[1], signal.SIGKILL)
    else:
        group.send_signal(signal.SIGINT)
    assert group.wait(60) != 0
    assert time.monotonic() - began < 30
    said = (tmp_path / "said").read_text()
    assert ("error: rank 1 of 2 has ended" if end == "dead" else "interrupted") in said, said
    assert 1 <= len(blocks(made)) < 56
    if end == "interrupted":
        assert summary(made)["interrupted"] and not list(made.glob("rank-*"))
