"""What is seen of a run while it decodes: the progress bar, the tracker's curves, a streamed answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specresearch import console
from specresearch.build import Streamer
from specresearch.decode import Emission
from specresearch.metrics import Block, Line
from specresearch.run import Run
from specresearch.types import Target


class Watch:
    """`turn` and `tokens` are for a run to call. With the target of a `stream`, text stands in for the bar."""

    def __init__(self, tracker: Any, turns: int, stream: Target | None, sharing: Any):
        self.tracker, self.sharing = tracker, sharing
        self.run: Run | None = None
        self.streamer = Streamer(stream) if stream is not None else None
        self.bar = console.progress()
        self.task = self.bar.add_task("decoding", total=turns, note="")

    def __enter__(self) -> Watch:
        if self.streamer is None:
            self.bar.start()
        else:
            console.out.print("[green]drafted and accepted[/], [yellow]the target's own (bonus)[/]\n")
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def completed(self, turns: int) -> None:
        self.bar.update(self.task, completed=turns)

    def turn(self, line: Line, lines: Sequence[Line], blocks: Sequence[Block]) -> None:
        emitted = [step["emitted"] for step in line["steps"]]
        steps = sum(len(each["steps"]) for each in lines)
        pooled = sum(len(each["output_ids"]) - 1 for each in lines) / steps if steps else None
        others = self.sharing.others if self.sharing else 0
        self.bar.update(self.task, completed=len(lines) + others, note=f"accepted length {console.number(pooled)}")
        if emitted:
            numbers = {"accept/answer_length": sum(emitted) / len(emitted), "accept/running_length": pooled or 0.0}
            if self.run and self.run.box.curve:  # of the blocks before
                numbers["lossless/log10_e"] = self.run.box.curve[-1][1]
            self.tracker.log(numbers, step=len(lines))

    def tokens(self, emission: Emission) -> None:
        assert self.streamer is not None
        for piece in self.streamer.feed(emission.tokens, emission.turn.text if emission.done else None):
            console.out.print(piece.text, style="green" if piece.drafted else "yellow", end="", markup=False)
        if emission.done:
            console.out.print()
