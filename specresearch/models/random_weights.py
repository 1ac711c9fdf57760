"""A model of a published shape with random weights: what an engine costs on it can be studied without its weights.

The weights are such that greedy decoding is decided by far more than rounding: each token's embedding dominates the stream,
and the head is the embedding (tied), which repeats the token, or the embedding moved on by one, which counts up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specresearch.models.hf import HFModel
from specresearch.models.linear import MOST, halve, quicken
from specresearch.models.loading import resolve_device, resolve_dtype
from specresearch.models.tiny import byte_tokenizer
from specresearch.types import UserError

PERIOD = 1_000_003  # of the random numbers; a prime above every vocabulary, so no two rows of a matrix are the same
STD = 0.02


@dataclass(frozen=True)
class Shape:
    """A line of shapes.yaml."""

    family: str  # transformers' model_type
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    context: int
    theta: float
    tied: bool

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head if self.family == "qwen3" else 0)
        block = attention + 3 * self.hidden * self.mlp + norms
        return self.layers * block + self.hidden + self.embeddings

    @property
    def embeddings(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        """Of the weights, and of the packed copies that a small float32 model has on a CPU; caches come on top."""
        size = self.parameters * dtype.itemsize
        linear = (self.parameters - self.vocab * self.hidden * (not self.tied)) * dtype.itemsize
        return size + (linear if device.type == "cpu" and dtype == torch.float32 and linear <= MOST else 0)

    def config(self) -> Any:
        return transformers.AutoConfig.for_model(
            self.family,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": float(self.theta)},
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


def shapes() -> dict[str, Shape]:
    table = yaml.safe_load((Path(__file__).parent / "shapes.yaml").read_text(encoding="utf-8"))
    return {name: Shape(**values) for name, values in table.items()}


def load(
    *,
    shape: str,
    dtype: str | None = None,
    device: str = "auto",
    weights: str | None = None,
    fast: str = "auto",
    seed: int = 0,
) -> HFModel:
    """Text goes byte by byte, and no answer ends before its budget. Raises UserError where the memory does not suffice."""
    known = shapes()
    if shape not in known:
        raise UserError(f"target.shape={shape} is unknown: use one of {', '.join(known)}")
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    if weights not in (None, "float16") or (weights and kind != torch.float32):
        raise UserError(
            f"target.weights={weights}: use null, or float16 with target.dtype=float32; random they are anyway"
        )
    require_memory(shape, known[shape], kind, where, free_bytes(where))
    model = make(known[shape], kind, where, seed)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    if weights is not None:
        quicken(model)
        halve(model)
    return HFModel(model, tokenizer, f"random {shape}", fast)


def require_memory(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, free: int) -> None:
    need = shape.bytes(dtype, device)
    if need <= free:
        return
    half = shape.bytes(torch.bfloat16, device)
    instead = "target.dtype=bfloat16 or a smaller target.shape" if half <= free else "a smaller target.shape"
    halved = f", {_gb(half)} in bfloat16" if dtype.itemsize > 2 else ""
    raise UserError(
        f"target.shape={name} needs {_gb(need)} for its weights in {str(dtype)[6:]}{halved}, and {_gb(free)} are free on "
        f"{device}: use {instead}"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def free_bytes(device: torch.device) -> int:
    """Memory that is to be had on a device; on a CPU what the machine has available and, if it says, the container allows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(most) - int(used)) if most != "max" else free
    except (OSError, ValueError):
        return free


class _Empty(TorchFunctionMode):
    """Weights are not drawn when modules are made: drawing those of a large model takes minutes, and they are replaced."""

    DRAWS = (Tensor.normal_, Tensor.uniform_, nn.init.trunc_normal_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in self.DRAWS else func(*args, **(kwargs or {}))


@torch.no_grad()
def make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    with torch.device(device), _Empty():
        model = transformers.AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(PERIOD, generator=generator, device=device, dtype=torch.float32).to(dtype)
    deep = STD / (2 * shape.layers) ** 0.5  # what all blocks add to the stream together stays below the embedding
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            if name.endswith("bias"):
                weight.zero_()
            continue
        _fill(weight.view(-1), noise)
        if "embed" not in name:
            weight.mul_(deep if name.endswith(("o_proj.weight", "down_proj.weight")) else STD)
    if not shape.tied:
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        head[1:].copy_(embedding[:-1])
        head[0].copy_(embedding[-1])
    return model


def _fill(flat: Tensor, noise: Tensor) -> None:
    whole = len(flat) // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).copy_(noise.expand(whole // PERIOD, -1))
    flat[whole:].copy_(noise[: len(flat) - whole])
