"""How a draft model follows the loop: with the target's own ids, or with the text of what was emitted, in its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specresearch.kernels.graph import may_ask
from specresearch.models.hf import HFModel
from specresearch.models.spelling import Spelling
from specresearch.types import Step, UserError, Verdict

LOOKBACK = 16  # newest tokens that may be written otherwise once more text is known


class SameIds:
    """Its cache lags behind the target's by the tokens since it was last asked: they are fed, with the next root, in one
    causal pass. That is right whatever nodes the tree kept, and costs no pass of its own."""

    def __init__(self, model: HFModel):
        self.model = model

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        self.model.reserve(batch, capacity, slots)
        self.most = slots  # tokens that may wait: one pass over many costs little more than one over one
        self.length = torch.zeros(batch, dtype=torch.long, device=self.model.device)  # tokens in this model's cache
        self.lag = 0  # most tokens by which it can be behind

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor) -> None:
        self.model.extend(rows, tokens, length, ())
        self.length[list(rows)] = length

    def root(self, step: Step) -> Tensor:
        """Feed what the cache lacks, the root last -> logits [B, 1, V] of the model's own vocabulary."""
        behind = torch.where(step.live, step.length - self.length, 0)
        width = 1 + (int(behind.max()) if may_ask(behind.device) else self.lag)
        length = step.length - behind
        position = length[:, None] + torch.arange(width, device=behind.device)
        tokens = step.tokens.gather(1, torch.minimum(position, step.length[:, None]))
        causal = torch.ones(width, width, dtype=torch.bool, device=behind.device).tril().expand(len(behind), -1, -1)
        logits, _ = self.model.run(tokens, position, length, causal, step.extent, keep=behind)
        self.length, self.extent, self.lag = step.length.clone(), step.extent, 0
        return logits

    def nodes(self, tokens: Tensor, depth: Tensor, ancestors: Tensor, start: int) -> Tensor:
        """Tokens of the model's own vocabulary [B, W], below the root of the last call -> logits [B, W, V]"""
        position = self.length[:, None] + depth
        return self.model.run(tokens, position, self.length, ancestors, self.extent, start=start)[0]

    def note(self, step: Step, verdict: Verdict) -> None:
        fresh = verdict.path.shape[1]
        if self.lag + fresh > self.most:
            self.root(step)
        self.lag += fresh  # the tokens themselves come from the loop's history, in `root`

    def release(self, rows: Sequence[int]) -> None: ...


class OwnTokens:
    """What stands in a row, written with the draft model's own tokens. Tokenizers work on the host, so a step reads what was
    emitted from the device once more. The newest tokens are written anew as text is added, since words go on; the cache
    keeps what stays the same. `recent` = each row's newest tokens of the target."""

    def __init__(self, model: HFModel, ours: Spelling, theirs: Spelling, special: dict[int, int]):
        self.model, self.ours, self.theirs, self.special = model, ours, theirs, special
        prefix = list(model.tokenizer("").input_ids)
        self.prefix = [id for id in prefix if id < model.vocab_size][:1]  # the begin of text, if it wants one
        self.most = min([model.context, *(most for most, _ in model.limits)])

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        if self.most < 4 * (slots + LOOKBACK):
            raise UserError(
                f"the draft model {self.model.name} takes {self.most} tokens, and the tree asks for {slots} at once: "
                "use a smaller tree"
            )
        # The rows of one pass are as wide as the widest, and each must have room for that.
        self.slots, device = 2 * (slots + LOOKBACK), self.model.device
        self.model.reserve(batch, min(capacity, self.most - self.slots), self.slots)
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch  # so many of them are in the model's cache
        self.seen = [0] * batch  # tokens of the target that they tell of
        self.recent: list[list[int]] = [[] for _ in range(batch)]
        self.length = torch.zeros(batch, dtype=torch.long, device=device)  # those before the root's last
        self.lag = 1

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor) -> None:
        for row, line, count in zip(rows, tokens.tolist(), length.tolist()):
            self.ids[row] = list(self.prefix)
            self.cached[row], self.seen[row], self.recent[row] = 0, count, line[:count][-LOOKBACK:]
            self._write(row, line[:count])
        self._fit()
        self._feed(rows)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.ids[row], self.cached[row] = [], 0

    def note(self, step: Step, verdict: Verdict) -> None:
        self.lag += verdict.path.shape[1]

    def root(self, step: Step) -> Tensor:
        """Feed what the cache lacks -> logits [B, 1, V] of the model's own vocabulary, after the root."""
        self._read(step)
        self._feed([row for row, ids in enumerate(self.ids) if len(ids) - self.cached[row] > self.slots])
        device, batch = self.model.device, len(self.ids)
        behind = [max(1, len(ids) - cached) for ids, cached in zip(self.ids, self.cached)]
        lines = [ids[-count:] or [0] for ids, count in zip(self.ids, behind)]
        width = max(behind)
        tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=device)
        keep = torch.tensor(behind, device=device) - 1
        length = torch.tensor([max(0, len(ids) - count) for ids, count in zip(self.ids, behind)], device=device)
        position = length[:, None] + torch.arange(width, device=device)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
        most = max(max(0, len(ids) - count) for ids, count in zip(self.ids, behind))
        logits, _ = self.model.run(tokens, position, length, causal, most, keep=keep)
        self.cached, self.length = [len(ids) for ids in self.ids], length + keep
        self.extent = max(max(0, len(ids) - 1) for ids in self.ids)
        return logits

    def nodes(self, tokens: Tensor, depth: Tensor, ancestors: Tensor, start: int) -> Tensor:
        """Tokens of the model's own vocabulary [B, W], below the root of the last call -> logits [B, W, V]"""
        position = self.length[:, None] + depth
        return self.model.run(tokens, position, self.length, ancestors, self.extent, start=start)[0]

    # -- text ------------------------------------------------------------------------------------------------------------

    def _read(self, step: Step) -> None:
        """Take over what was emitted since the last call: one read of the device."""
        back = torch.arange(max(1, self.lag) - 1, -1, -1, device=step.length.device)
        newest = step.tokens.gather(1, (step.length[:, None] - back).clamp(min=0))
        table = torch.cat([step.length[:, None], step.live.long()[:, None], newest], 1).tolist()
        for row, (length, live, *tokens) in enumerate(table):
            if live and (count := length + 1 - self.seen[row]):
                self._write(row, tokens[-count:])
                self.recent[row] = [*self.recent[row], *tokens[-count:]][-LOOKBACK:]
                self.seen[row] = length + 1
        self.lag = 0
        self._fit()

    def _write(self, row: int, tokens: Sequence[int]) -> None:
        """Put the text of the target's `tokens` behind that of the row; its newest word may come to be written otherwise."""
        old = self.ids[row]
        begin = word_start(self.theirs, old)
        new, text = old[:begin], self.theirs.join(old[begin:]) or b""
        opening = not text and (not old or self.theirs.pieces[old[-1]] is None)
        for token in tokens:
            piece = self.ours.pieces[token] if token < len(self.ours.pieces) else None
            if piece is not None:
                text += piece
                continue
            new += self.theirs.encode(text, opening)
            text, opening = b"", True
            if (twin := self.special.get(token)) is not None and new[-1:] != [twin]:
                new.append(twin)
        new += self.theirs.encode(text, opening)
        same = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        self.ids[row], self.cached[row] = new, min(self.cached[row], same)

    # -- cache -----------------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Forget the oldest half of a row that the model cannot hold; get a larger cache where this one is too small."""
        for row, ids in enumerate(self.ids):
            if len(ids) + self.slots > self.most:
                self.ids[row], self.cached[row] = ids[-((self.most - self.slots) // 2) :], 0
        need, cache = max(map(len, self.ids)), self.model.cache
        if cache is None or need + self.slots > cache.slots:
            self.model.reserve(len(self.ids), min(2 * need, self.most - self.slots), self.slots)
            self.cached = [0] * len(self.ids)

    def _feed(self, rows: Sequence[int]) -> None:
        """Prefill rows, as far as they have tokens."""
        rows = [row for row in rows if self.ids[row]]
        if not rows:
            return
        lines = [self.ids[row] for row in rows]
        width = max(map(len, lines))
        tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=self.model.device)
        self.model.extend(rows, tokens, torch.tensor([len(line) for line in lines], device=self.model.device), ())
        for row in rows:
            self.cached[row] = len(self.ids[row])


def word_start(spelling: Spelling, ids: Sequence[int]) -> int:
    """Where the newest text that may yet be written otherwise begins: at a word, not further back than `LOOKBACK` tokens nor
    than a special token; len(ids) if no word begins there."""
    first = len(ids)
    for at in range(len(ids) - 1, max(-1, len(ids) - 1 - LOOKBACK), -1):
        piece = spelling.pieces[ids[at]]
        if piece is None:
            break
        if piece.startswith(b" "):
            first = at
    return first
