"""A thread that makes calls for others, who do not wait."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class Worker:
    """Makes calls in order, each without arguments. They must not raise; one that never returns holds up those after it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="tracker", daemon=True)  # never keeps the process alive
        self._thread.start()

    def send(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def close(self, seconds: float) -> bool:
        """Wait until all calls are made, `seconds` at most -> whether they are."""
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
