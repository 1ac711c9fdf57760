"""Which implementation the kernels run: torch, the reference, on any device; or Triton, for GPUs; or `cpu`, for some on CPUs.

Triton is optional: without it the torch reference serves every device. With TRITON_INTERPRET=1 set before Python starts,
Triton's kernels run on the CPU too, slowly, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from specresearch.types import UserError

__all__ = ["Backend", "chosen", "interpreted", "jit", "on_triton", "power_of_2", "tl", "triton", "use"]

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns until somebody decides; fused is its old default

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

Backend = Literal["auto", "torch", "triton"]
_chosen: list[Backend] = ["auto"]


def jit(kernel: Callable) -> Any:
    """`triton.jit`, or the bare function where Triton is not installed (it is never called then)."""
    return kernel if triton is None else triton.jit(kernel)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def use(*, name: Backend) -> None:
    """Choose for the whole process. Raises UserError where Triton is asked for and cannot run."""
    if name not in ("auto", "torch", "triton"):
        raise UserError(f"kernels={name} is unknown: use auto, torch or triton")
    if name == "triton" and triton is None:
        raise UserError("kernels=triton: Triton is not installed: `pip install triton`, or use kernels=torch")
    if name == "triton" and not (torch.cuda.is_available() or interpreted()):
        raise UserError("kernels=triton needs a GPU: use kernels=auto (or TRITON_INTERPRET=1, very slow, to debug)")
    _chosen[0] = name


def chosen() -> Backend:
    return _chosen[0]


def on_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernel is to run on this tensor."""
    if _chosen[0] == "torch" or triton is None:
        return False
    return tensor.is_cuda or (_chosen[0] == "triton" and interpreted())


def power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
