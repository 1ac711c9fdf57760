"""One target in many hands: the adapter's, and a plain copy for each other library, the same weights to the bit.

The adapter changes the class of a model's `nn.Linear` and may round its matrices to half precision; so every other library gets
a model of its own, made plain by transformers and filled with what the adapter's holds then: rounded once, computed with in
float32. Where a library's own form of a drafter can hold ours (a draft model, Medusa heads), it is given ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch import Tensor, nn
from torch.nn import functional as F

from specresearch import overrides
from specresearch.build import build
from specresearch.decode import Parts


class Spread(nn.Module):
    """A vocabulary matrix of some rows alone -> logits of the whole vocabulary, -inf where the matrix has no row."""

    def __init__(self, weight: Tensor, kept: Tensor, size: int):
        super().__init__()
        self.weight, self.size = nn.Parameter(weight.detach().clone(), requires_grad=False), size
        self.register_buffer("kept", kept.clone())

    def forward(self, x: Tensor) -> Tensor:
        some = F.linear(x, self.weight)
        full = some.new_full((*some.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.kept, some)


class Models:
    """The target as the adapter loads it, and plain copies of it and of our drafters, one for each library."""

    def __init__(self, given: Sequence[str]):
        self.given = list(given)
        self.found: dict[str, Any] = {}  # what a library's search found, by technique
        self.copies: dict[tuple[str, torch.dtype | None], Any] = {}

    def parts(self, *chosen: str, name: str = "") -> Parts:
        """Ours. Overrides hold for all, `NAME:key=value` for one."""
        return build(configuration([*chosen, *own(name, self.given)]), self.target)

    @cached_property
    def target(self) -> Any:
        return build(configuration(["drafter=none", *own("", self.given)])).target

    def forget(self) -> None:
        """The adapter's target, where only copies are needed from here on."""
        self.__dict__.pop("target", None)

    def plain(self, library: str, dtype: torch.dtype | None = None) -> Any:
        """A model that no other library and no adapter has touched."""
        if (library, dtype) not in self.copies:
            self.copies[library, dtype] = copy_of(self.target.model, dtype)
        return self.copies[library, dtype]

    def small(self, library: str) -> Any:
        """Our distilled small LM as an ordinary model, on the library's own copy of the target's embedding."""
        drafter: Any = self.parts("drafter=small_lm", name="small_lm").drafter
        student, target = drafter.model.model, self.plain(library)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(student.config, dtype=torch.float32)
        weights = {n: t.detach().clone() for n, t in student.state_dict().items() if n.startswith("model.")}
        made.load_state_dict(weights, strict=False, assign=True)
        made.model.embed_tokens.weight = target.get_input_embeddings().weight
        made.model.rotary_emb = type(made.model.rotary_emb)(config=student.config).to(student.device)
        size = student.config.vocab_size
        kept = student.vocabulary.kept if hasattr(student, "vocabulary") else torch.arange(size)
        made.lm_head = Spread(student.get_output_embeddings().weight, kept, size)
        made.generation_config = transformers.GenerationConfig.from_model_config(student.config)
        return made.eval().requires_grad_(False)


def own(name: str, given: Sequence[str]) -> list[str]:
    return [a.removeprefix(f"{name}:") for a in given if ":" not in a.split("=")[0] or a.startswith(f"{name}:")]


def configuration(chosen: Sequence[str]) -> Any:
    chosen = overrides.prepare(["tracker=none", *chosen])
    if GlobalHydra.instance().is_initialized():
        return compose("config", chosen)
    with initialize_config_dir(overrides.CONF, version_base="1.3"):
        return compose("config", chosen)


def copy_of(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A plain model with the same weights, or with those rounded to `dtype`."""
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(model.config, dtype=dtype or model.dtype)
    weights = {
        name: tensor.detach().to(dtype or tensor.dtype, copy=True) for name, tensor in model.state_dict().items()
    }
    made.load_state_dict(weights, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config=model.config)  # its buffers are not in the state dict
    made.to(model.device)
    made.generation_config = model.generation_config
    return made.eval().requires_grad_(False)


class Passes:
    """Counts the calls of a model while it decodes."""

    def __init__(self, model: nn.Module):
        self.count = 0
        model.register_forward_pre_hook(self._call)

    def _call(self, *_: Any) -> None:
        self.count += 1
