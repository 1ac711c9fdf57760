"""Several processes that make one run, started by torchrun. Rank 0 leads: it alone reads the command line, drafts, decides,
prints and writes. The others follow: they take part in the passes of a target that is spread over all ranks (tensor
parallel), or answer a share of the questions (data parallel), and otherwise wait for the next order.

Ranks that decided for themselves would part: logits differ by rounding from rank to rank, so trees, accepted counts and the
shapes of the next collective would differ, and the run would hang. Here a follower has no opinion: the tree reaches it with
the order for the pass, the verdict with the order to commit, the first token of an answer as the root of the first tree.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from specresearch.types import Step, Tree, UserError, Verdict

PASS = timedelta(minutes=10)  # a rank that is silent for so long in the middle of a pass is given up
WAIT = timedelta(days=365)  # for the next order: rank 0 may be busy with anything
SECOND = 5.0  # a Ctrl-C that comes so soon after another is torchrun's copy of it
DONE, BYE = 1.0, 0.0  # what a follower says to rank 0
# What of a record reaches the others: neither q, nor the history, nor the dice.
SENT: dict[type, tuple[str, ...]] = {
    Step: ("length", "extent"),
    Tree: ("tokens", "parent", "depth", "valid"),
    Verdict: ("path", "length", "next_token"),
}
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Order:
    """What a follower is to do. `alike`: all ranks do it, so that a mistake of the user shows on rank 0 too."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    alike: bool
    forgotten: tuple[int, ...] = ()  # models that rank 0 no longer has


class Group:
    """The ranks of one run, as one of them sees it."""

    def __init__(self, rank: int, world: int, store: Any):
        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % gpus)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PASS)
        self.orders, self.words = (dist.new_group(backend="gloo", timeout=WAIT) for _ in range(2))
        self.rank, self.world, self.store = rank, world, store
        self.depth = 0  # > 0: inside something that all ranks do
        self.broken = False  # a follower may be in the middle of a pass that rank 0 has left
        self.models: dict[int, Any] = {}  # of a follower, by number
        self.count, self.forgotten = 0, list[int]()
        self.done, self.gone, self.lost = set[int](), set[int](), list[int]()  # followers, as rank 0 hears of them
        self.interrupted, self.held = -SECOND, False  # when Ctrl-C came last; whether one waits for the end of a pass
        if rank == 0:
            self._lead()

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        for rank in range(1, self.world):
            threading.Thread(target=self._listen, args=[rank], daemon=True).start()
        signal.signal(signal.SIGTERM, self._ended)
        signal.signal(signal.SIGINT, self._interrupt)

    def _listen(self, rank: int) -> None:
        """Hear a follower until it says goodbye; one that falls silent for ever ends the run."""
        word = torch.ones(1)
        try:
            while word.item() != BYE:
                dist.recv(word, src=rank, group=self.words)
                self.done.add(rank)
            self.gone.add(rank)
        except Exception:
            self.lost.append(rank)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _ended(self, *_: Any) -> None:
        """A follower has died, or torchrun ends the others because of it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.broken = True
        raise UserError(self._why() or "stopped from outside (SIGTERM)")

    def _interrupt(self, *_: Any) -> None:
        now, before = time.monotonic(), self.interrupted
        self.interrupted = now
        if now - before < SECOND:
            return
        if self.depth and before < 0:  # not in the middle of what the others take part in, unless the user insists
            self.held = True
            return
        raise KeyboardInterrupt

    def _why(self, patience: float = 2.0) -> str | None:
        """Who is lost; a connection breaks a moment before or after that is known."""
        until = time.monotonic() + patience
        while not self.lost and time.monotonic() < until:
            time.sleep(0.01)
        return f"rank {self.lost[0]} of {self.world} has ended, and the run with it" if self.lost else None

    def order(self, call: Callable[..., Any], *args: Any, alike: bool = False, **kwargs: Any) -> None:
        """Have the followers call `call(group, *args, **kwargs)`."""
        if self.broken:
            raise UserError(self._why(0) or "the ranks have parted in the middle of a pass: start the run again")
        forgotten, self.forgotten = tuple(self.forgotten), []
        self.done.clear()
        self._send(Order(call, args, kwargs, alike, forgotten))

    def everywhere(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`call(group, *args, **kwargs)` on all ranks at once -> what it returns here."""
        if self.depth:
            return call(self, *args, **kwargs)
        order = functools.partial(self.order, call, *args, alike=True, **kwargs)
        return self.within(lambda: (order(), call(self, *args, **kwargs))[1])

    def within(self, call: Callable[[], Any]) -> Any:
        """What the ranks do together."""
        self.depth += 1
        try:
            return call()
        except UserError:
            raise
        except BaseException as fault:
            self.broken = True
            why = self._why() if isinstance(fault, RuntimeError) and self.rank == 0 else None
            if why or (isinstance(fault, RuntimeError) and "imed out" in str(fault)):
                raise UserError(why or _silent()) from None
            raise
        finally:
            self.depth -= 1
            if self.held and not self.depth:
                self.held = False
                raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask the followers to leave their own work where it is."""
        self.store.set("stop", "1")

    def stopped(self) -> bool:
        return bool(self.store.check(["stop"]))

    def wait(self, seconds: float, tick: Callable[[], None] = lambda: None) -> bool:
        """Until all followers have done what was ordered, `seconds` at most -> whether they have."""
        until = time.monotonic() + seconds
        while len(self.done) < self.world - 1 and time.monotonic() < until:
            tick()
            time.sleep(0.05)
        return len(self.done) == self.world - 1

    def leave(self, status: int) -> NoReturn:
        """The end of rank 0, and of the others."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.store.set("left", "1")  # so that nobody takes it for a death
        if not self.broken and not self.lost:
            with suppress(UserError):
                self._send(None)
                self.wait_for_goodbyes()
        _exit(status)

    def wait_for_goodbyes(self, seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds
        while len(self.gone) + len(self.lost) < self.world - 1 and time.monotonic() < until:
            time.sleep(0.01)

    # -- the others --------------------------------------------------------------------------------------------------

    def follow(self) -> NoReturn:
        """Do what rank 0 orders, until it leaves. They are silent, but for the error that ends them."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a Ctrl-C means, rank 0 decides
        speak, sys.stdout = sys.stderr, open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stdout
        mistake: UserError | None = None
        try:
            while (order := self._receive()) is not None:
                for number in order.forgotten:
                    self.models.pop(number, None)
                try:
                    self.within(functools.partial(order.call, self, *order.args, **order.kwargs))
                except UserError as error:
                    mistake = error
                    if not order.alike:
                        raise
                if not order.alike:
                    self._say(DONE)
            self._say(BYE)
        except BaseException as error:
            if not self._left():
                also = f" (before that: {mistake})" if mistake is not None and mistake is not error else ""
                what = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                if isinstance(error, RuntimeError) and "onnection" in str(error):
                    what = "another rank has ended"
                print(f"error: rank {self.rank}: {' '.join(f'{what}{also}'.split())}", file=speak, flush=True)
            _exit(1)
        _exit(0)

    def _left(self) -> bool:
        try:
            return bool(self.store.check(["left"]))
        except Exception:  # it went with rank 0
            return False

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, order: Order | None) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(order)), dtype=torch.uint8)
        try:
            for part in (torch.tensor([len(data)]), data):
                dist.broadcast(part, 0, group=self.orders, async_op=True).wait(PASS)
        except RuntimeError:
            self.broken = True
            raise UserError(self._why() or _silent()) from None

    def _receive(self) -> Order | None:
        size = torch.zeros(1, dtype=torch.long)
        dist.broadcast(size, 0, group=self.orders)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.orders)
        return pickle.loads(data.numpy().tobytes())

    def _say(self, word: float) -> None:
        dist.send(torch.tensor([word]), 0, group=self.words)

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks, inside something that all of them do."""
        values = [value]
        dist.broadcast_object_list(values, 0, group=self.orders)
        return values[0]

    # -- models whose weights are spread over the ranks ----------------------------------------------------------------

    def register(self, model: Any) -> int:
        """Every rank makes the same models in the same order -> the number by which an order names this one."""
        number, self.count = self.count, self.count + 1
        if self.rank:
            self.models[number] = model
        else:
            weakref.finalize(model, self.forgotten.append, number).atexit = False
        return number


def together(method: F) -> F:
    """A method of a model that may be spread over the ranks: rank 0 has the others call it with the same arguments."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        group: Group | None = self.group
        if group is None or group.depth:
            return method(self, *args, **kwargs)
        sent = [_packed(arg) for arg in args], {name: _packed(arg) for name, arg in kwargs.items()}
        order = functools.partial(group.order, _take_part, self.number, method.__name__, *sent, alike=True)
        return group.within(lambda: (order(), method(self, *args, **kwargs))[1])

    return call  # type: ignore[return-value]


@torch.inference_mode()
def _take_part(group: Group, number: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    model = group.models[number]
    unpack = functools.partial(_unpacked, device=model.device)
    getattr(model, name)(*map(unpack, args), **{key: unpack(arg) for key, arg in kwargs.items()})


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    if fields := SENT.get(type(value)):
        return SimpleNamespace(**{name: _packed(getattr(value, name)) for name in fields})
    return value


def _unpacked(value: Any, device: torch.device) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(device)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: _unpacked(field, device) for name, field in vars(value).items()})
    return value


def _silent() -> str:
    return f"a rank has been silent for {PASS.total_seconds():g} s in the middle of a pass: the run ends"


def _exit(status: int) -> NoReturn:
    """Without waiting for threads that wait for other processes."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(status)


_group: Group | None = None


def current() -> Group | None:
    return _group


def join() -> Group | None:
    """The group that torchrun started this process in, made at the first call; None for a process that is alone."""
    global _group
    named = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if _group is None and named and int(os.environ["WORLD_SIZE"]) > 1:
        store, rank, world = next(iter(rendezvous("env://")))
        _group = Group(rank, world, store)
    return _group
