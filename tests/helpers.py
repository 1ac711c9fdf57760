"""Decoding in tests: the loop with parts made by hand, and a naive reference that shares none of its code."""

import torch

from specresearch.decode import Decoder, Job, Parts, Turn
from specresearch.drafters.ngram import NGram
from specresearch.drafters.none import NoDrafter
from specresearch.drafters.small_lm import SmallLM
from specresearch.kernels import verify
from specresearch.kernels.tree import links
from specresearch.sampling import Sampler
from specresearch.trees.auto import AutoTree
from specresearch.trees.best_first import BestFirstTree
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.optimal import OptimalTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Drafter, Target, TreePolicy, Verifier
from specresearch.verifiers.rejection import Rejection

ACCEPTANCE = [[0.6, 0.2, 0.1], [0.5, 0.2], [0.4]]


def trees(temperature: float = 0.0, draw: str | None = None) -> dict[str, TreePolicy]:
    heat = {"temperature": temperature, "draw": draw}
    return {
        "chain": Chain(depth=4, **(heat if draw != "without_replacement" else {"temperature": temperature})),
        "dynamic": DynamicTree(depth=3, topk=3, size=8, **heat),
        "static": StaticTree(widths=[3, 2, 1], **heat),
        "best_first": BestFirstTree(depth=3, topk=3, size=7, **heat),
        "auto": AutoTree(depth=4, topk=3, size=10, cost={1: 1.0, 10: 1.2}, draft_cost=0.05, **heat),
        "optimal": OptimalTree(size=9, depth=3, acceptance=ACCEPTANCE, **heat),
    }


def drafters(target: Target, folder: str) -> dict[str, Drafter]:
    return {
        "none": NoDrafter(target),
        "ngram": NGram(target, max_n=3, min_n=1, order="recency", backoff=0.001),
        "small_lm": SmallLM(target, id=folder, dtype="float64"),
        "early_exit": SmallLM(target, layers=1),
    }


def decode(
    target: Target,
    prompts: list[list[int]],
    *,
    drafter: Drafter,
    policy: TreePolicy,
    verifier: Verifier | None = None,
    sampler: Sampler | None = None,
    batch: int = 1,
    budget: int = 24,
    stop: tuple[str, ...] = (),
    seed: int = 0,
) -> list[Turn]:
    """All answers, in the order of the prompts."""
    parts = Parts(target, drafter, policy, verifier or Rejection(), sampler or Sampler())
    capacity = max(map(len, prompts)) + budget
    slots = max(policy.asked, policy.size)
    target.reserve(batch, capacity, slots)
    drafter.reserve(batch, capacity, slots)
    decoder = Decoder(parts, batch=batch, capacity=capacity, seed=seed, decode=target.text, stop=stop)
    jobs = [Job(i, "test", 0, ids, budget) for i, ids in enumerate(prompts)]
    turns = {e.turn.job.id: e.turn for e in decoder.run(iter(jobs)) if e.done}
    return [turns[i] for i in range(len(prompts))]


@torch.no_grad()
def naive_greedy(target, prompt: list[int], budget: int) -> list[int]:
    """Argmax of a whole new forward per token: no cache, no mask, no position of ours."""
    ids = list(prompt)
    while len(ids) < len(prompt) + budget:
        token = int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
        if token in target.eos:
            break
    return ids[len(prompt) :]


def accept_all_drafts(monkeypatch) -> None:
    """A planted fault: at temperature 0, whatever was drafted first is accepted."""
    follow = verify._follow

    def wrong(tree, choice):
        first, _ = links(tree.parent, tree.valid)
        drafted = tree.tokens.gather(1, first.clamp(min=0))
        return follow(tree, torch.where(first >= 0, drafted, choice))

    monkeypatch.setattr(verify, "_follow", wrong)
