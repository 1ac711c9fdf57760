"""Our tree attention, as an implementation that transformers can choose: any model that takes its attention from
transformers' interface runs on it, with no copied modelling file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specresearch.kernels.attention import tree_attention

NAME = "specresearch_tree"
# What a model may hand over and we may leave aside: the adapter gives positions, masks and limits on windows itself.
ASIDE = {
    "position_ids",
    "cache_position",
    "sliding_window",
    "max_length_q",
    "max_length_k",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}


class TreeMask(NamedTuple):
    """Reaches the attention as the keyword `tree` of the model's forward: see `kernels.attention.tree_attention`."""

    words: Tensor | None  # None where the 4-D mask that comes along is to be used
    length: Tensor


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: TreeMask | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Without `tree` this is transformers' own SDPA. Raises NotImplementedError for what the tree kernel does not compute."""
    if tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    flags = (bool, type(None))
    lacks = [name for name, given in kwargs.items() if name not in ASIDE and not isinstance(given, flags)]
    if lacks or dropout:
        raise NotImplementedError(", ".join(lacks) or "dropout")
    dense = None if tree.words is not None else attention_mask
    return tree_attention(query, key, value, tree.words, tree.length, scaling, dense), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class Takeover:
    """The attention of some blocks, where it is transformers' SDPA; between passes the model is as it was."""

    def __init__(self, blocks: nn.ModuleList):
        found = {id(config): config for m in blocks.modules() if (config := getattr(m, "config", None)) is not None}
        self.configs = [config for config in found.values() if hasattr(config, "_attn_implementation")]

    @property
    def possible(self) -> bool:
        return bool(self.configs) and all(config._attn_implementation == "sdpa" for config in self.configs)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            for config in self.configs:
                config._attn_implementation = NAME
            yield
        finally:
            for config in self.configs:
                config._attn_implementation = "sdpa"
