"""Products of few rows with large matrices on a CPU, on weights that are packed once: by oneDNN in float32; by our kernel
(`kernels.cpu`) or else FBGEMM where half precision holds the weights, which halves the bytes to read. The arithmetic is
float32 in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specresearch.kernels import cpu

PACKED = 8  # rows that the packing is made for; it serves all numbers of rows
MOST = 4 << 30  # bytes of a model that are held twice; a larger one keeps the plain product
AVAILABLE = bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
HALF = "fbgemm" in torch.backends.quantized.supported_engines  # x86 with AVX2


class Packed:
    """The weights of layers that read the same input, packed as one; packed anew where one has changed.

    A plain product packs the weight at every call, which few rows do not repay. All matrices of SmolLM2, float32, two
    threads of a Zen 3, plain and packed in one run: 1 row 60 and 47 ms, 4 rows 160 and 50, 8 rows 123 and 60, 32 rows 190
    and 99, 128 rows 422 and 299. In half precision FBGEMM's takes 22, 25, 38, 93 and 320, where a row's result may change by
    rounding with the number of rows beside it; our own 17.5, 20, 26, 79 and 290, where it does not (`kernels/cpu.cpp`).
    """

    seen: list[tuple[int, int] | None] | None = None
    product: nn.Module

    def __call__(self, x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
        """x [..., in] -> the layers' outputs side by side [..., sum of out]"""
        now = [_state(tensor) for layer in layers for tensor in layer._parameters.values()]
        if now != self.seen:
            self.product, self.seen = packed(layers), now
        return self.product(x)


def packed(layers: Sequence[nn.Linear]) -> nn.Module:
    """The layers' product, with their weights as they are now."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    bias = torch.cat(biases) if any(layer.bias is not None for layer in layers) else None
    # Weights that were loaded after the rounding may be finer.
    rounded = all(getattr(layer, "holds_half", False) for layer in layers) and torch.equal(
        weight.half().float(), weight
    )
    if not (HALF and rounded):
        return Single(torch.ops.mkldnn._reorder_linear_weight(weight, PACKED), bias)
    if cpu.serves():
        return Half(*cpu.pack(weight, bias), len(weight))
    return Quantized(torch.ops.quantized.linear_prepack_fp16(weight, bias))


def _state(tensor: Tensor | None) -> tuple[int, int] | None:
    """Changes with the tensor's content."""
    return None if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


def may_pack(x: Tensor, weight: Tensor) -> bool:
    """In float32 on a CPU, where no gradient is asked for."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and AVAILABLE
    )


class Linear(nn.Linear):
    """`nn.Linear`, by the packed product where that serves."""

    packed: Packed | None = None
    holds_half: bool = False  # half precision holds its weight

    def forward(self, x: Tensor) -> Tensor:
        if not may_pack(x, self.weight):
            return super().forward(x)
        if self.packed is None:
            self.packed = Packed()
        return self.packed(x, [self])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "packed"}


class Joined:
    """Layers that read the same input, as one product where the packed one serves. All have a bias, or none."""

    def __init__(self, *layers: nn.Linear):
        self.layers, self.packed = layers, Packed()

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> the outputs side by side [..., sum of out]"""
        first = self.layers[0]
        if isinstance(first, Linear) and may_pack(x, first.weight):
            return self.packed(x, self.layers)
        return torch.cat([layer(x) for layer in self.layers], -1)

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "packed": Packed()}  # what was packed is neither copied nor stored


class Half(nn.Module):
    """Our kernel's product, as a part that TorchScript takes."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out: int):
        super().__init__()
        self.weight, self.bias, self.out = weight, bias, out

    def forward(self, x: Tensor) -> Tensor:
        return cpu.half_linear(x, self.weight, self.bias, self.out)


class Quantized(nn.Module):
    """FBGEMM's product, as a part that TorchScript takes."""

    def __init__(self, weight: Any):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.weight)


class Single(nn.Module):
    """oneDNN's product, as a part that TorchScript takes."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Apart(nn.Module):
    """Layers that read the same input, one after the other."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            found.append(layer(x))
        return found[0] if len(found) == 1 else torch.cat(found, -1)


def product(*layers: nn.Linear) -> nn.Module:
    """The layers' product for inference as their weights are now: packed as one where that serves, and nothing is hooked
    to them (ranks that share a layer add up behind it)."""
    ours = all(isinstance(layer, Linear) and not layer._forward_hooks for layer in layers)
    if not (ours and AVAILABLE and all(_single(layer.weight) for layer in layers)):
        return Apart(layers)
    return packed(layers)


def _single(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def states(module: nn.Module) -> list[tuple[int, int] | None]:
    """Changes with the content of any weight."""
    return [_state(weight) for weight in module.parameters()]


def quicken(model: nn.Module) -> None:
    """Give every plain `nn.Linear` of `model` this forward; weights and names stay."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if sum(layer.weight.numel() * layer.weight.element_size() for layer in layers) <= MOST:
        for layer in layers:
            layer.__class__ = Linear


@torch.no_grad()
def halve(model: nn.Module) -> None:
    """Round the matrices of a float32 model to half precision, once; whoever computes with them, these are its weights."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32:
            layer.weight.copy_(layer.weight.half())
            if isinstance(layer, Linear):
                layer.holds_half = True
