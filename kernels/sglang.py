"""SGLang's speculative tree functions under its names, argument order and shapes, for its users and for comparisons.

b requests, k topk, S drafted steps, n nodes of a tree (root included), V vocabulary. A candidate's flat index is c for
step 0 and k + k k (i-1) + r k + c for child c of frontier node r at step i. -1 = none. Outputs are returned, never
written into arguments. Malformed trees and links are bounded as in `tree.climb` and `verify.walk_links`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specresearch.kernels import mask as masks
from specresearch.kernels import sampling, tree, verify
from specresearch.types import Verdict

INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64)


def select_top_k_tokens(
    step: int, topk_p: Tensor, topk_index: Tensor, scores: Tensor | None, topk: int
) -> dict[str, Tensor]:
    """One step of the beam. Step 0: `topk_p`, `topk_index` [b, k]. Later: [b k, k] (or [b, k, k]), one row a frontier node, and
    `scores` [b, k], the `next_scores` of the step before.

    -> scores [b, 1, k] or [b, k, k], tokens [b, k] or [b, k k], parents [b, k+1] or [b, k] (flat indices of the new
    frontier), input_ids and next_scores [b, k]. Equal scores keep the lower index.
    """
    if topk < 1:
        raise ValueError(f"topk={topk}: use 1 or more")
    _type("topk_p", topk_p, FLOATS)
    _type("topk_index", topk_index, INTEGERS)
    if step == 0:
        batch = topk_p.numel() // max(topk, 1)
        _shape("topk_p", topk_p, (batch, topk))
        _shape("topk_index", topk_index, (batch, topk))
        parents = torch.arange(-1, topk, device=topk_p.device).repeat(batch, 1)
        tokens = topk_index.long()
        return {
            **{"scores": topk_p[:, None].clone(), "tokens": tokens.clone(), "parents": parents},
            **{"input_ids": tokens.clone(), "next_scores": topk_p.clone()},
        }
    if step < 0 or scores is None:
        raise ValueError(f"step={step} needs scores: [b, {topk}], the next_scores of the step before")
    _type("scores", scores, FLOATS)
    batch = topk_p.numel() // topk**2
    for name, tensor in (("topk_p", topk_p), ("topk_index", topk_index)):
        if tuple(tensor.shape) not in ((batch * topk, topk), (batch, topk, topk)):
            raise ValueError(f"{name} has shape {list(tensor.shape)}: [{batch * topk}, {topk}] is needed")
    _shape("scores", scores, (batch, topk))
    expanded = scores[..., None] * topk_p.reshape(batch, topk, topk)
    tokens = topk_index.reshape(batch, topk * topk).long()
    best = expanded.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    return {
        **{"scores": expanded, "tokens": tokens, "parents": best + topk * topk * (step - 1) + topk},
        **{"input_ids": tokens.gather(1, best), "next_scores": expanded.flatten(1).gather(1, best)},
    }


def organize_draft_results(
    score_list: list[Tensor], token_list: list[Tensor], parents_list: list[Tensor], num_draft_token: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best n - 1 of all candidates -> parent_list [b, k (S-1) + 1] ([b, 0] for one step), top_scores_index and
    draft_tokens [b, n-1], ascending. Ties go to the lower index, and no child is kept without its parent."""
    if not score_list or not len(score_list) == len(token_list) == len(parents_list):
        raise ValueError("score_list, token_list and parents_list need one entry a step, and at least one")
    if score_list[0].dim() != 3 or 0 in score_list[0].shape[1:]:
        raise ValueError(f"score_list[0] has shape {list(score_list[0].shape)}: [b, 1, k] is needed")
    batch, topk = score_list[0].shape[0], score_list[0].shape[-1]
    for step in range(len(score_list)):
        rows = topk if step else 1
        for name, given, shape, types in (
            ("score_list", score_list, (batch, rows, topk), FLOATS),
            ("token_list", token_list, (batch, rows * topk), INTEGERS),
            ("parents_list", parents_list, (batch, topk if step else topk + 1), INTEGERS),
        ):
            _shape(f"{name}[{step}]", given[step], shape)
            _type(f"{name}[{step}]", given[step], types)
    scores = torch.cat([s.flatten(1) for s in score_list], 1)
    tokens = torch.cat(token_list, 1).long()
    count = num_draft_token - 1
    if not 0 <= count <= scores.shape[1]:
        raise ValueError(
            f"num_draft_token={num_draft_token}: from 1 to {scores.shape[1] + 1} (all candidates and the root)"
        )
    parent_list = torch.cat(parents_list[:-1], 1) if len(parents_list) > 1 else tokens[:, :0].clone()
    flat = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    kept = tree.organize(scores, _flat_parent(flat, parent_list, topk), count, len(score_list))
    return parent_list, kept, tokens.gather(1, kept)


def _flat_parent(index: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """Flat index of each candidate's parent; -1 where it is the root, -2 where it is out of range."""
    group = index.div(topk, rounding_mode="floor")
    held = (group > 0) & (group < parent_list.shape[1])
    if parent_list.shape[1] == 0:
        return torch.where(group == 0, -1, -2)
    found = parent_list.gather(1, torch.where(held, group, 0))
    return torch.where(group == 0, -1, torch.where(held & (found >= 0), found, -2))


def build_tree(
    bonus_tokens: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    mask_mode: masks.Mode = "full",
) -> dict[str, Tensor]:
    """Masks, positions and links of the trees that `organize_draft_results` selected; the bonus token is the root.

    -> tree_mask (flat, see `mask.layout`), positions and draft_tokens [b n], retrieve_index, retrieve_next_token,
    retrieve_next_sibling [b, n]. A node whose parent was not selected is linked by nobody and sees itself and the root.
    """
    batch, nodes = bonus_tokens.numel(), num_draft_tokens
    if depth < 1 or topk < 1 or not 1 <= nodes <= masks.MOST_NODES:
        raise ValueError(f"depth={depth}, topk={topk}, num_draft_tokens={nodes}: use 1 or more, and up to 1024 nodes")
    _shape("bonus_tokens", bonus_tokens, (batch,))
    _shape("seq_lens", seq_lens, (batch,))
    _shape("top_scores_index", top_scores_index, (batch, nodes - 1))
    _shape("draft_tokens", draft_tokens, (batch, nodes - 1))
    if depth > 1 or parent_list.shape != (batch, 0):
        _shape("parent_list", parent_list, (batch, topk * (depth - 1) + 1))
    given = {"bonus_tokens": bonus_tokens, "parent_list": parent_list, "top_scores_index": top_scores_index}
    for name, tensor in {**given, "draft_tokens": draft_tokens, "seq_lens": seq_lens}.items():
        _type(name, tensor, INTEGERS)

    above = _flat_parent(top_scores_index.long(), parent_list.long(), topk)
    slot = (
        (top_scores_index[:, None] == above[..., None]) & (above >= 0)[..., None]
    ).int()  # (i, j): node j + 1 is the parent of node i + 1
    found = torch.where(slot.any(-1), slot.argmax(-1) + 1, -1) if nodes > 1 else above
    parent = torch.cat([torch.full_like(bonus_tokens[:, None], -1), torch.where(above == -1, 0, found)], 1).long()
    cells, count = tree.climb(torch.where(parent > 0, parent, -1), depth)  # up to, but without, the root
    cells[:, 0], count[:, 0] = False, 0
    cells[..., 0] = True
    seq_lens = seq_lens.long()
    return {
        "tree_mask": masks.layout(cells, seq_lens, mask_mode),
        "positions": (seq_lens[:, None] + count).flatten(),
        **_retrieve(batch, nodes, tree.links(parent)),
        "draft_tokens": torch.cat([bonus_tokens[:, None], draft_tokens], 1).long().flatten(),
    }


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, seq_lens: Tensor, batch: int, num_draft_tokens: int
) -> dict[str, Tensor]:
    """Positions and links from ancestor masks bool [b n n], flat -> as in `build_tree`."""
    nodes = num_draft_tokens
    if nodes < 1:
        raise ValueError(f"num_draft_tokens={nodes}: use 1 or more")
    _shape("tree_mask", tree_mask, (batch * nodes * nodes,))
    _type("tree_mask", tree_mask, (torch.bool,))
    _type("seq_lens", seq_lens, INTEGERS)
    _shape("seq_lens", seq_lens, (batch,))
    cells = tree_mask.view(batch, nodes, nodes)
    parent = tree.parents_of_mask(cells)
    below = cells & torch.ones(nodes, nodes, dtype=torch.bool, device=cells.device).tril(-1)
    seen = below.any(1)
    child = torch.where(seen, below.int().argmax(1), -1)  # the first later row that sees this column
    return {
        "positions": (seq_lens.long()[:, None] + below.sum(-1)).flatten(),
        **_retrieve(batch, nodes, (child, tree.links(parent)[1])),
    }


def _retrieve(batch: int, nodes: int, links: verify.Links) -> dict[str, Tensor]:
    index = torch.arange(batch * nodes, device=links[0].device).view(batch, nodes)
    return {"retrieve_index": index, "retrieve_next_token": links[0], "retrieve_next_sibling": links[1]}


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    num_steps: int,
) -> dict[str, Tensor]:
    """All [b, n] -> predicts [b n], accept_index [b, num_steps + 1], accept_token_num [b] (without the bonus), int32."""
    links = _candidates(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, num_steps)
    _type("target_predict", target_predict, INTEGERS)
    if target_predict.dim() != 1 or target_predict.numel() != candidates.numel():  # flat will do, too
        _shape("target_predict", target_predict, tuple(candidates.shape))
    own = torch.arange(candidates.shape[0], device=candidates.device)[:, None] * candidates.shape[1]
    inside = (retrieve_index >= own) & (retrieve_index < own + candidates.shape[1])
    predicted = target_predict.flatten().long()[torch.where(inside, retrieve_index, own).long()]
    choice = torch.where(inside, predicted, -1)
    verdict = verify.greedy_links(candidates.long(), links, num_steps, choice)
    return _accepted(verdict, candidates, retrieve_index)


def tree_speculative_sampling_target_only(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    num_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> dict[str, Tensor]:
    """Coins [b, n] by parent slot, final coins [b], target_probs [b, n, V] -> as `verify_tree_greedy`.

    As in SGLang, the mass of a repeated sibling counts again, which biases the output: use `specresearch`'s own verifier
    for trees that may hold duplicates. A row without mass, or with NaN, ends in V - 1.
    """
    links = _candidates(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, num_steps)
    batch, nodes = candidates.shape
    _probs("target_probs", target_probs, (batch, nodes))
    _uniforms(uniform_samples, uniform_samples_for_final_sampling, batch, nodes)
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: use a number from 0 to 1")
    verdict = verify.target_only_links(
        *(candidates.long(), links, num_steps, target_probs, uniform_samples, uniform_samples_for_final_sampling),
        *(threshold_single, max(threshold_acc, 1e-9)),
    )
    return _accepted(_else_last(verdict, target_probs), candidates, retrieve_index)


def chain_speculative_sampling(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
) -> dict[str, Tensor]:
    """Drafts [b, S] without the root, q [b, S, V], p [b, S+1, V], coins [b, S], final coins [b] -> predicts int32 [b, S+1], -1
    padded, and accept_token_num int32 [b]. The rule is `verify.chain`; an empty residual ends in V - 1."""
    if draft_tokens.dim() != 2:
        raise ValueError(f"draft_tokens has shape {list(draft_tokens.shape)}: [b, S] is needed")
    batch, steps = draft_tokens.shape
    _type("draft_tokens", draft_tokens, INTEGERS)
    _probs("target_probs", target_probs, (batch, steps + 1))
    _probs("draft_probs", draft_probs, (batch, steps))
    if draft_probs.shape[2] != target_probs.shape[2]:
        raise ValueError(f"draft_probs has {draft_probs.shape[2]} tokens and target_probs has {target_probs.shape[2]}")
    _uniforms(uniform_samples, uniform_samples_for_final_sampling, batch, steps)
    tokens = draft_tokens.long()
    uniforms = (uniform_samples, uniform_samples_for_final_sampling)
    verdict = _else_last(verify.chain(tokens, draft_probs, target_probs, *uniforms), target_probs)
    place = torch.arange(steps + 1, device=tokens.device)
    last = verdict.length[:, None] - 1
    predicts = torch.where(place < last, torch.nn.functional.pad(tokens, (0, 1)), -1)
    predicts = torch.where(place == last, verdict.next_token[:, None], predicts)
    return {"predicts": predicts.int(), "accept_token_num": last[:, 0].int()}


def top_k_renorm_prob(probs: Tensor, top_k: sampling.Parameter) -> Tensor:
    """Rows [R, V] cut to their `top_k` largest (an int, or [R]) and renormalised; ties with the last all stay."""
    _renorm("top_k", probs, top_k, INTEGERS)
    return sampling.top_k_renorm(probs, top_k)


def top_p_renorm_prob(probs: Tensor, top_p: sampling.Parameter) -> Tensor:
    """Rows [R, V] cut to the fewest tokens that reach `top_p` (a float, or [R]) and renormalised; ties all stay."""
    _renorm("top_p", probs, top_p, FLOATS)
    return sampling.top_p_renorm(probs, top_p)


# -- what is given, what is returned ---------------------------------------------------------------------------------------


def _accepted(verdict: Verdict, candidates: Tensor, retrieve_index: Tensor) -> dict[str, Tensor]:
    """A path of nodes -> SGLang's three results. `predicts` lies at retrieve_index: each accepted token at its parent."""
    batch, nodes = candidates.shape
    path, last = verdict.path, verdict.length[:, None] - 1
    at = path.clamp(min=0)
    index = torch.where(path >= 0, retrieve_index.long().gather(1, at), -1)
    following = torch.nn.functional.pad(at[:, 1:], (0, 1))
    token = candidates.long().gather(1, following)
    token = torch.where(torch.arange(path.shape[1], device=path.device) == last, verdict.next_token[:, None], token)
    own = torch.arange(batch, device=path.device)[:, None] * nodes
    inside = (index >= own) & (index < own + nodes)  # never another request's slots
    predicts = torch.full((batch * nodes + 1,), -1, dtype=torch.int32, device=path.device)
    predicts[torch.where(inside, index, batch * nodes)] = token.int()
    return {
        "predicts": predicts[:-1],
        "accept_index": index.int(),
        "accept_token_num": last[:, 0].int(),
    }


def _else_last(verdict: Verdict, probs: Tensor) -> Verdict:
    """SGLang answers V - 1 where no mass is left to draw from."""
    token = torch.where(verdict.next_token < 0, probs.shape[-1] - 1, verdict.next_token)
    return Verdict(verdict.path, verdict.length, token)


def _candidates(candidates: Tensor, index: Tensor, first: Tensor, sibling: Tensor, num_steps: int) -> verify.Links:
    if candidates.dim() != 2:
        raise ValueError(f"candidates has shape {list(candidates.shape)}: [b, n] is needed")
    if num_steps < 0:
        raise ValueError(f"num_steps={num_steps}: use 0 or more")
    names = {"retrieve_index": index, "retrieve_next_token": first, "retrieve_next_sibling": sibling}
    for name, tensor in {"candidates": candidates, **names}.items():
        _shape(name, tensor, tuple(candidates.shape))
        _type(name, tensor, INTEGERS)
    return first.long(), sibling.long()


def _probs(name: str, probs: Tensor, shape: tuple[int, int]) -> None:
    if probs.dim() != 3 or probs.shape[2] < 1 or tuple(probs.shape[:2]) != shape:
        raise ValueError(f"{name} has shape {list(probs.shape)}: [{shape[0]}, {shape[1]}, V] is needed")
    _type(name, probs, FLOATS)


def _uniforms(coins: Tensor, final: Tensor, batch: int, each: int) -> None:
    _shape("uniform_samples", coins, (batch, each))
    _type("uniform_samples", coins, FLOATS)
    _shape("uniform_samples_for_final_sampling", final, (batch,))
    _type("uniform_samples_for_final_sampling", final, FLOATS)


def _renorm(name: str, probs: Tensor, value: sampling.Parameter, types: tuple[torch.dtype, ...]) -> None:
    if probs.dim() != 2 or probs.shape[1] < 1:
        raise ValueError(f"probs has shape {list(probs.shape)}: [rows, V] is needed")
    _type("probs", probs, FLOATS)
    if isinstance(value, Tensor):
        _shape(name, value, (probs.shape[0],) if value.dim() else ())
        _type(name, value, types)
    elif value != value or (types is INTEGERS and not isinstance(value, int)):
        raise ValueError(f"{name}={value}: use {'a whole number' if types is INTEGERS else 'a number'}")


def _shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: {list(shape)} is needed")


def _type(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}: use {' or '.join(str(a) for a in allowed)}")
