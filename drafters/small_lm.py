"""A smaller language model, of the target's vocabulary or of another one, or the target's own first layers (early exit)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specresearch.models.checkpoints import shipped
from specresearch.models.distilled import is_student, load_student
from specresearch.models.hf import HFModel
from specresearch.models.linear import halve
from specresearch.models.loading import load, require_same_vocabulary, resolve_dtype
from specresearch.models.reading import OwnTokens, SameIds
from specresearch.models.retelling import retell
from specresearch.models.spelling import Spelling, shared, twins
from specresearch.models.vocabulary import SharedTokens
from specresearch.types import Ask, Drafter, Frontier, Kept, Step, Target, Tree, TreePolicy, UserError, Verdict

VOCABULARIES = ("same", "intersection", "text")


class SmallLM(Drafter):
    """How a model of another vocabulary drafts is `vocab`'s to say. `intersection`: q is its law restricted to the tokens that
    both write alike, and renormalised (token-level intersection, Timor et al. 2025, arXiv:2502.05202), so that any tree can
    be drawn from it. `text`: it goes on greedily with `tree.depth` tokens of its own, and their text, in the target's tokens,
    is one chain of points."""

    def __init__(
        self,
        target: Target,
        *,
        id: str | None = None,
        revision: str | None = None,
        layers: int | None = None,
        dtype: str | None = None,
        vocab: str = "same",
    ):
        if not isinstance(target, HFModel):
            raise UserError("drafter=small_lm needs a Hugging Face target: use target=hf or target=smollm2")
        if id is not None and layers is not None:
            raise UserError("drafter.id and drafter.layers name two models: give one of them")
        if vocab not in VOCABULARIES:
            raise UserError(f"drafter.vocab={vocab} is unknown: use one of {', '.join(VOCABULARIES)}")
        if vocab != "same" and (id is None or is_student(id)):
            raise UserError(
                f"drafter.vocab={vocab} is for a model with a tokenizer of its own: give drafter.id=<Hub id or folder>"
            )
        if layers is not None:
            self.model = target.first_layers(layers)
        else:
            self.model = _other(target, id or _shipped(target.name), revision, dtype, vocab == "same")
            if target.half:
                halve(self.model.model)
        self.vocab_size = target.vocab_size
        # What it can propose, where that is not all it knows: a distilled one, or one of another vocabulary.
        self.vocabulary: Any = getattr(self.model.model, "vocabulary", None)
        self.reader: SameIds | OwnTokens = SameIds(self.model)
        if vocab != "same":
            self._learn(target, f"drafter.id={id}")
        if vocab == "text":
            self.law, self.growth = "point", "static"

    def _learn(self, target: HFModel, name: str) -> None:
        """How the two vocabularies go together."""
        if target.tokenizer is None or self.model.tokenizer is None:
            raise UserError(f"{name}: without both tokenizers it is not known what the tokens write")
        ours = Spelling(target.tokenizer, target.vocab_size, target.name)
        theirs = Spelling(self.model.tokenizer, min(self.model.vocab_size, self.model.embedded), name)
        special = twins(ours, theirs, (_ends(target), _ends(self.model)))
        pairs = shared(ours, theirs, special)
        if not pairs:
            raise UserError(f"{name} shares no token with the target: it cannot draft for it")
        self.vocabulary = SharedTokens(pairs, target.device)
        self.reader = OwnTokens(self.model, ours, theirs, special)

    def reserve(self, batch: int, capacity: int, slots: int) -> None:
        self.reader.reserve(batch, capacity, slots)

    def extend(self, rows: Sequence[int], tokens: Tensor, length: Tensor, features: Tensor | None) -> None:
        self.reader.extend(rows, tokens, length)

    def expand(self, frontier: Frontier) -> Tensor:
        if frontier.start == 0:
            logits = self.reader.root(frontier.step)
        else:
            other = isinstance(self.vocabulary, SharedTokens)
            tokens = self.vocabulary.translate(frontier.tokens) if other else frontier.tokens
            logits = self.reader.nodes(tokens, frontier.depth, frontier.ancestors, frontier.start)
        if self.vocabulary is not None:
            return self.vocabulary.spread(logits, self.vocab_size)
        # Padded embedding rows on either side: cut what the target lacks, forbid what this model lacks.
        missing = self.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def propose(self, step: Step, policy: TreePolicy, ask: Ask) -> Tree:
        if self.law is None:
            return policy.grow(step, ask)
        assert isinstance(self.reader, OwnTokens)
        return chain_of_text(self.reader, step, policy.depth) if policy.depth else Tree.of_root(step)

    def commit(self, step: Step, tree: Tree, verdict: Verdict, features: Tensor | None) -> None:
        self.reader.note(step, verdict)

    def release(self, rows: Sequence[int]) -> None:
        self.reader.release(rows)

    def kept(self) -> Kept | None:
        model = self.model.kept()
        return Kept((self.reader,), model.fixed) if model and isinstance(self.reader, SameIds) else None


def chain_of_text(reader: OwnTokens, step: Step, depth: int) -> Tree:
    """The text of `depth` greedy tokens of the draft model, as a chain of at most `depth` tokens of the target."""
    drafted, score = _greedy(reader, step, depth)
    special = {theirs: ours for ours, theirs in reader.special.items()}
    batch, device = len(drafted), step.root.device
    lines = [
        retell(recent, own, reader.ours, reader.theirs, special)[:depth] for recent, own in zip(reader.recent, drafted)
    ]
    pad = [[*line, *[(0, 0)] * (depth - len(line))] for line in lines]
    table = torch.tensor(pad, device=device)  # [B, depth, 2]
    valid = (table[..., 1] > 0) & step.live[:, None]
    score = score.gather(1, (table[..., 1] - 1).clamp(0, depth - 1))
    zero = torch.zeros_like(step.root)[:, None]
    node = torch.arange(depth + 1, device=device).expand(batch, -1)
    return Tree(
        tokens=torch.cat([step.root[:, None], table[..., 0]], 1),
        parent=node - 1,
        depth=node,
        valid=torch.cat([zero == 0, valid], 1),
        score=torch.cat([zero.float(), torch.where(valid, score, -torch.inf)], 1),
        law="point",
        growth="static",
        levels=depth,
    ).trim()


def _greedy(reader: OwnTokens, step: Step, depth: int) -> tuple[list[list[int]], Tensor]:
    """-> the draft model's own next `depth` tokens of each row, and their cumulative log-probabilities [B, depth]"""
    logits, tokens, score = reader.root(step)[:, 0], [], []
    for level in range(1, depth + 1):
        best, token = logits.float().log_softmax(-1).max(-1)
        tokens.append(token)
        score.append(best)
        if level < depth:
            above = torch.ones(len(token), 1, level + 1, dtype=torch.bool, device=token.device)
            logits = reader.nodes(token[:, None], torch.full_like(token, level)[:, None], above, level)[:, 0]
    return torch.stack(tokens, 1).tolist(), torch.stack(score, 1).cumsum(1)


def _ends(model: HFModel) -> list[int]:
    """Ids that end a text, the tokenizer's own first."""
    own = getattr(model.tokenizer, "eos_token_id", None)
    return ([own] if own in model.eos else []) + [id for id in model.eos if id != own]


def _shipped(target: str) -> str:
    try:
        return shipped("small_lm", target)
    except UserError as error:
        raise UserError(
            f"drafter=small_lm needs a model: give drafter.id=<Hub id or folder>, or drafter.layers=k to draft with the "
            f"target's first k layers ({error})"
        ) from None


def _other(target: HFModel, id: str, revision: str | None, dtype: str | None, same: bool) -> HFModel:
    """A distilled model of this target, or any causal LM, if need be of the same vocabulary."""
    if isinstance(id, str) and is_student(id):
        return load_student(id, target, resolve_dtype(dtype, target.device) if dtype else None)
    model = load(id=id, revision=revision, dtype=dtype or str(target.dtype)[6:], device=str(target.device))
    if same:
        require_same_vocabulary(target, model, f"drafter.id={id}")
    return model
