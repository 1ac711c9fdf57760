"""The laws that the black box needs: p by the target's own forward, and a weak draft q of the same prefix.

Neither a tree, a cache, a mask nor a position of ours takes part, so a fault in any of them shows as a bias of the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specresearch.grammar.rows import masks
from specresearch.lossless.blackbox import BlackBox
from specresearch.sampling import Sampler
from specresearch.types import Target, UserError

Line = dict[str, Any]
EDGE_SHARE = 1e-6  # of the law with looser truncations, mixed into p: no more than rounding
CHUNK = 256  # places whose rows [CHUNK, V] are held at once; a longer answer's prefix is computed again for each


class Reference:
    """p and q at every place of an answer, processed and warped exactly as the run was.

    q is the target itself on the last `context` to context + stride - 1 tokens: windows of that length at every `stride`-th
    place, each from position 0, answer for their last `stride` places. With stride = context, the default, they hold
    twice p's tokens, and not `context` times, as windows for each place do (stride=1). One pass with a band of `context` in
    its mask would be no weak draft: each layer reaches `context` further back.

    A `draft` of the same vocabulary takes the place of these windows. It is a function of the prefix too, and if the run
    drafted with it, it points exactly at where a faulty rule pushes the output: fewer tokens will do.
    """

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        context: int = 10,
        stride: int | None = None,
        draft: Target | None = None,
    ):
        if type(context) is not int or context < 1 or (stride is not None and stride < 1):
            raise UserError(f"context={context}, stride={stride}: the weak draft needs at least one token to see")
        self.target, self.sampler, self.draft = target, sampler, draft
        # Another order of summation moves the edge of a truncation: a token there is no proof against a right engine.
        truncates = sampler.top_p < 1 or sampler.top_k or sampler.min_p
        self.loose = sampler.loosened() if truncates and sampler.temperature else None
        self.context, self.stride = context, stride or context

    def rows(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """-> p, q [n, V] at the places of the n output tokens"""
        parts = list(self.chunks(prompt_ids, output_ids))
        return torch.cat([p for _, p, _ in parts]), torch.cat([q for _, _, q in parts])

    @torch.inference_mode()
    def chunks(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The same piece by piece -> the tokens [k], p, q [k, V] of up to CHUNK places."""
        if not prompt_ids:
            raise UserError("an answer without prompt_ids cannot be judged: its first token has no prefix")
        most, largest = len(prompt_ids) + len(output_ids), max(*prompt_ids, *output_ids, 0)
        if largest >= self.target.vocab_size:
            raise UserError(f"token {largest} lies outside the target's vocabulary of {self.target.vocab_size}")
        if most > self.target.context + 1:
            raise UserError(
                f"an answer of {most} tokens, its prompt included, exceeds the context of {self.target.context}"
            )
        ids = torch.tensor([*prompt_ids, *output_ids], device=self.target.device)
        size = max(CHUNK // self.stride, 1) * self.stride
        masked = masks(self.sampler.grammar, output_ids)
        for start in range(len(prompt_ids) - 1, len(ids) - 1, size):
            places = torch.arange(start, min(start + size, len(ids) - 1), device=ids.device)
            logits = self.target.plain(ids[None, : int(places[-1]) + 1], places)[0]
            allow = None if masked is None else masked[places - (len(prompt_ids) - 1), None]
            p = self._law(self.sampler, logits, ids, places, allow)
            if self.loose is not None:
                p = torch.lerp(p, self._law(self.loose, logits, ids, places, allow), EDGE_SHARE)
            yield ids[places + 1], p, self._law(self.sampler, self._weak(ids, places), ids, places, allow)

    def _law(self, sampler: Sampler, logits: Tensor, ids: Tensor, places: Tensor, allow: Tensor | None) -> Tensor:
        history = ids.expand(len(places), -1)
        return sampler.warp(sampler.process(logits[:, None], history, places + 1, allow=allow))[:, 0]

    def _weak(self, ids: Tensor, places: Tensor) -> Tensor:
        """Raw logits [k, V] of the draft, or of the target on short windows."""
        if self.draft is not None:
            return self.draft.plain(ids[None, : int(places[-1]) + 1], places)[0]
        reach, stride, first = self.context, self.stride, int(places[0])
        begin = torch.arange(first, int(places[-1]) + 1, stride, device=ids.device) - reach + 1
        offset = torch.arange(reach + stride - 1, device=ids.device)
        whole = begin >= 0
        windows = torch.cat([ids, ids.new_zeros(reach + stride)])[(begin.clamp(min=0)[:, None] + offset)]
        late = offset[reach - 1 :]
        # What stands right of a place is not seen by it, so pads and later tokens do no harm.
        found = [self.target.plain(windows[i : i + 1], late + begin[i]) for i in range(int((~whole).sum()))]
        if bool(whole.any()):
            found.append(self.target.plain(windows[whole], late))
        return torch.cat(found).flatten(0, 1)[: len(places)]


def judge(reference: Reference, answers: Iterable[Line], box: BlackBox) -> BlackBox:
    """Add every output token of some answers ({id, turn, prompt_ids, output_ids}, as in a trace) to the evidence."""
    for line in answers:
        for tokens, p, q in reference.chunks(line["prompt_ids"], line["output_ids"]):
            box.update(p, q, tokens, [line["id"]] * len(tokens))
    return box


def of_lines(path: str | Path) -> list[Line]:
    """Answers from JSON lines with `prompt_ids` and `output_ids`: a run's trace, or the log of any server. Lines without an
    `id` are numbered. Raises UserError, naming the line, for what cannot be judged."""
    try:
        texts = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"path={path} cannot be read: {reason}") from None
    lines = [_line(text, f"{path} line {number}", number) for number, text in enumerate(texts, 1) if text.strip()]
    if not any(line["output_ids"] for line in lines):
        raise UserError(f"{path} holds no output tokens to judge")
    return lines


def _line(text: str, where: str, number: int) -> Line:
    try:
        fields = json.loads(text)
    except ValueError:
        raise UserError(f'{where} is not JSON: put {{"prompt_ids": [...], "output_ids": [...]}} on each line') from None
    if not isinstance(fields, dict):
        raise UserError(f'{where}: an object with "prompt_ids" and "output_ids" is needed')
    for key in ("prompt_ids", "output_ids"):
        ids = fields.get(key)
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise UserError(f'{where}: "{key}" must be a list of token ids')
    if not fields["prompt_ids"]:
        raise UserError(f'{where}: "prompt_ids" is empty, so the first token has no prefix')
    id = fields.get("id", number)
    if not isinstance(id, int | str) or isinstance(id, bool):
        raise UserError(f"{where}: the id must be a number or a text")
    return {"id": id, "turn": fields.get("turn", 0), **{key: fields[key] for key in ("prompt_ids", "output_ids")}}
