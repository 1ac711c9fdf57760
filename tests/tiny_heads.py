"""Random draft heads for the tiny target: enough variance that every part of them shows in the logits."""

import torch

from specresearch.models.checkpoints import fit_to
from specresearch.models.eagle import EagleConfig, EagleHead
from specresearch.models.medusa import MedusaConfig, MedusaHeads

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
FIRST = SIZES | {"version": 1, "draft_vocab_size": 257, "target_hidden_size": 16, "taps": ("norm",)}
FIRST |= {"bias": True, "from_target": ("embed_tokens.weight", "lm_head.weight"), "vocab_size": 257}
THIRD = SIZES | {"version": 3, "draft_vocab_size": 100, "target_hidden_size": 16, "taps": (1, 2, 3)}
THIRD |= {"from_target": ("embed_tokens.weight",), "vocab_size": 257}


def randomise(head, seed=0):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in head.named_parameters():
            scale = 0.5 if p.dim() == 1 else 1.2 / p.shape[-1] ** 0.5
            offset = 1.0 if "norm" in name else 0.0
            p.copy_(offset + scale * torch.randn(p.shape, generator=noise, dtype=torch.float64))
    return head.requires_grad_(False)


def eagle_head(target=None, seed=0, dtype=torch.float64, **fields):
    config = EagleConfig(**((FIRST if fields.get("version") == 1 else THIRD) | fields))
    head = randomise(EagleHead(config).to(dtype), seed)
    if head.vocabulary.reduced:
        noise = torch.Generator().manual_seed(seed)
        ids = torch.randperm(config.vocab_size, generator=noise)[: config.draft_vocab_size]
        head.vocabulary.keep(ids.sort().values)
    if target is not None:
        fit_to(head, target)
    return head


def medusa_heads(target=None, seed=0, dtype=torch.float64, **fields):
    sizes = {"heads": 3, "layers": 1, "hidden_size": 16, "vocab_size": 257, "draft_vocab_size": 257}
    heads = randomise(MedusaHeads(MedusaConfig(**(sizes | fields))).to(dtype), seed)
    if target is not None:
        fit_to(heads, target)
    return heads
