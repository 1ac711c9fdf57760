"""Several ranks in tests: forks of this process, since torchrun's processes would each import everything again."""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import transformers.distributed.tensor_parallel  # noqa: F401, slow imports, once for all forks

from specresearch import cli
from specresearch.drafters import ngram, small_lm  # noqa: F401
from specresearch.models import tiny  # noqa: F401


@dataclass(frozen=True)
class Ended:
    """What became of the ranks: exit statuses (128 + n for signal n), and what each wrote."""

    statuses: list[int]
    outputs: list[str]


def launch(
    folder: Path,
    *arguments: str,
    world: int = 2,
    seconds: float = 120,
    plant: Callable[[int], None] = lambda rank: None,
    meanwhile: Callable[[list[int]], None] = lambda pids: None,
) -> Ended:
    """The command line in `world` processes, as torchrun would start it. `plant(rank)` puts a fault into one of them,
    `meanwhile` is called now and then; what has not ended after `seconds` is killed (status 137)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [_start(rank, world, port, folder, arguments, plant) for rank in range(world)]
    return _wait(pids, folder, seconds, meanwhile)


def _wait(pids: list[int], folder: Path, seconds: float, meanwhile: Callable[[list[int]], None]) -> Ended:
    left, statuses, until = set(pids), dict[int, int](), time.monotonic() + seconds
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                statuses[pid] = code if code >= 0 else 128 - code
                left.discard(pid)
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            until = float("inf")
        meanwhile(sorted(left))
        time.sleep(0.02)
    outputs = [(folder / f"out.{rank}").read_text() for rank in range(len(pids))]
    return Ended([statuses[pid] for pid in pids], outputs)


def _start(
    rank: int, world: int, port: int, folder: Path, arguments: tuple[str, ...], plant: Callable[[int], None]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()  # pytest's, which would write into its output
        out = os.open(folder / f"out.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
        cli.console.out.file = sys.stdout
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
        sys.argv = ["specresearch", *arguments]
        plant(rank)
        cli.main()
    except SystemExit as exit:
        sys.stdout.flush()
        os._exit(int(exit.code or 0))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(99)
