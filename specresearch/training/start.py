"""Where a draft head begins: at the target's own layers and vocabulary matrix, which already speak its language."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specresearch.models.checkpoints import load_head
from specresearch.models.eagle import SHARED, EagleConfig, EagleHead
from specresearch.models.hf import HFModel
from specresearch.training.packs import Library, token_counts
from specresearch.types import Tap, UserError


def eagle_config(
    target: HFModel, version: int, draft_vocab: int, taps: tuple[Tap, ...], fc_norm: bool, own_kv: bool, tied: bool
) -> EagleConfig:
    """As wide as the target. `own_kv`: as many K and V heads as queries, since the token comes in through V alone. `tied`: the
    vocabulary matrix is the target's own, not trained."""
    c: Any = target.model.config.get_text_config()
    heads, shared = c.num_attention_heads, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return EagleConfig(
        version=version,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=heads,
        num_kv_heads=heads if own_kv else shared,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        target_hidden_size=c.hidden_size,
        taps=taps,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=float(c.rope_parameters["rope_theta"]),
        fc_norm=fc_norm,
        from_target=SHARED if tied else SHARED[:1],
    )


def default_taps(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high feature, as EAGLE-3's authors choose them."""
    return 2, layers // 2, layers - 3


@torch.no_grad()
def draft_tokens(target: HFModel, library: Library, size: int, places: int = 4096) -> Tensor:
    """The tokens that the target chooses most often -> ids [size], ascending.

    Counted in the training part, and summed over its laws at some places, which know more than one draw from each.
    """
    items, matrix = library.part(held_out=False), target.head.weight.detach()
    some = items[:: max(1, sum(len(i.dialogue.tokens) for i in items) // (2 * places))]
    pack = library.pack(some).to(target.device, target.dtype)
    normed = pack.features[pack.chosen.roll(-1)][:places, library.columns(("norm",), matrix.shape[1])]
    counts = token_counts(items, target.vocab_size).double()
    for part in normed.split(256):
        counts += (part @ matrix.t()).float().softmax(-1).sum(0).double().cpu()
    return counts.topk(size).indices.sort().values


@torch.no_grad()
def from_target_layers(head: EagleHead, target: HFModel, kept: Tensor, scale: Tensor) -> None:
    """EAGLE-3: the layer is the target's last one, its token half the first one's; the state starts as the highest feature.

    `scale` = size (root mean square) of a typical highest feature.
    """
    first: Any = target.blocks[0]
    last: Any = target.blocks[-1]
    c = head.config
    head.lm_head.weight.copy_(target.head.weight[kept])
    head.norm.weight.copy_(target.model.base_model.norm.weight)
    nn.init.normal_(head.fc.weight, std=0.005 * (float(scale) if c.fc_norm else 1.0))
    top = head.fc.weight[:, -c.target_hidden_size :]
    top += torch.eye(c.hidden_size) * (float(scale) if c.fc_norm else 1.0)
    mid: Any = head.midlayer
    mid.hidden_norm.weight.copy_(last.input_layernorm.weight)
    mid.input_layernorm.weight.copy_(first.input_layernorm.weight)
    mid.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        halves = [getattr(block.self_attn, name).weight for block in (first, last)]
        own = getattr(mid.self_attn, name).weight
        own.copy_(torch.cat([_repeated(half, own.shape[0], c.head_dim) for half in halves], 1))
    mid.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mid.mlp, name).weight.copy_(getattr(last.mlp, name).weight)


@torch.no_grad()
def from_head(head: EagleHead, folder: str, target: HFModel) -> None:
    """Go on from a trained head of the same shape, with its draft vocabulary if that is as large.

    Rows that a smaller one lacks are the target's, moved as training moved the others on average: a softmax does not see a
    shift that all share, and would see one that some lack.
    """
    old, _ = load_head(folder, layers=len(target.blocks))
    ours, theirs = head.config, old.config
    if replace(ours, draft_vocab_size=1) != (
        replace(theirs, draft_vocab_size=1) if isinstance(theirs, EagleConfig) else None
    ):
        raise UserError(f"drafter.start={folder} holds a head of another shape than the one to be trained")
    tensors = {n: t for n, t in old.state_dict().items() if n not in (*SHARED, "vocabulary.d2t")}
    head.load_state_dict(tensors, strict=False)
    if theirs.draft_vocab_size == ours.draft_vocab_size:
        head.vocabulary.keep(old.vocabulary.kept.to(head.vocabulary.kept))
    if "lm_head.weight" in ours.from_target:
        head.lm_head.weight.copy_(target.head.weight[head.vocabulary.kept])
        return
    place = torch.full((target.vocab_size,), -1)
    place[old.vocabulary.kept] = torch.arange(theirs.draft_vocab_size)
    rows = place[head.vocabulary.kept.cpu()]
    trained = old.state_dict()["lm_head.weight"][rows.clamp(min=0)].to(head.lm_head.weight)
    had = (rows >= 0).to(trained.device)
    moved = head.lm_head.weight + (trained - head.lm_head.weight)[had].mean(0)
    head.lm_head.weight.copy_(torch.where(had[:, None], trained, moved))


def _repeated(weight: Tensor, rows: int, width: int) -> Tensor:
    """K or V heads of a grouped attention, once for each query head."""
    times = rows // weight.shape[0]
    return weight.view(-1, width, weight.shape[1]).repeat_interleave(times, 0).reshape(rows, -1)
