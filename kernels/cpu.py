"""What torch does slowly with few rows, on x86 CPUs: cpu.cpp, compiled where first wanted, about 20 s once a machine.

Where it cannot be compiled, or `kernels=torch` asks for torch's own, torch serves: FBGEMM's product with matrices that half
precision holds (`models.linear`), which reads them at half the speed of memory and rounds a row differently with other rows
beside it, and a norm of seven operators (`models.fast`).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specresearch.folders import cache_dir
from specresearch.kernels.backend import chosen

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-O3", "-std=c++17", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-shared", "-fPIC")
TILE, LANES = 4, 8  # outputs and inputs that lie together


def serves() -> bool:
    """Whether these may be asked for; compiles them if that was not done yet."""
    return chosen() != "torch" and _loaded()


def pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """weight [out, in], bias [out] -> the form that `half_linear` reads: [out / 4, in / 8, 4, 8], filled up with zeros"""
    out, width = weight.shape
    weight = torch.nn.functional.pad(weight.half(), (0, -width % LANES, 0, -out % TILE))
    packed = weight.view(-1, TILE, weight.shape[1] // LANES, LANES).transpose(1, 2).contiguous()
    return packed, None if bias is None else torch.nn.functional.pad(bias, (0, -out % TILE))


def half_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """x [..., in] float32, what `pack` gave, and the number of outputs -> [..., out], summed in float32: a row's sums are the
    same to the bit whatever rows are beside it. Only where it `serves`."""
    return torch.ops.specresearch.half_linear(x, weight, bias, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H], both float32 -> x / sqrt(mean(x^2) + eps) * weight. Only where it `serves`."""
    return torch.ops.specresearch.rms_norm(x, weight, eps)


@cache
def _loaded() -> bool:
    if sys.platform != "linux" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    try:
        torch.ops.load_library(_compiled())
    except (ImportError, OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as fault:
        words = getattr(fault, "stderr", None) or str(fault)
        reason = next((line for line in words.splitlines() if "error" in line), words.strip())[:200]
        print(f"kernels/cpu.cpp cannot be used, so passes take longer: {reason}", file=sys.stderr)
        return False
    return True


def _compiled() -> Path:
    """The library for this source and this torch. Its name tells its content, so that a damaged one is made anew; it is
    written aside first, so that processes do not meet half of one."""
    origin = SOURCE.read_bytes(), FLAGS, os.environ.get("CXX"), torch.__version__
    name = f"kernels-{_digest(repr(origin).encode())}"
    folder = cache_dir()
    for path in folder.glob(f"{name}-*.so"):
        if path.stem == f"{name}-{_digest(path.read_bytes())}":
            return path
    command = _command()
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"there is no {command[0]} to compile it (install a C++ compiler, e.g. g++)")
    folder.mkdir(parents=True, exist_ok=True)
    print("compiling kernels/cpu.cpp, once for this torch (about 20 s)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "made.so"
        subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True)
        path = folder / f"{name}-{_digest(made.read_bytes())}.so"
        os.replace(made, path)
    return path


def _command() -> list[str]:
    from torch.utils import (
        cpp_extension,
    )  # slow, and it needs setuptools: where nothing is to be compiled, neither is wanted

    compiler = shlex.split(cpp_extension.get_cxx_compiler()) or ["c++"]  # CXX may be two words
    include = [word for folder in cpp_extension.include_paths() for word in ("-isystem", folder)]
    link = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    return [*compiler, *FLAGS, *include, str(SOURCE), *link, "-lc10", "-ltorch_cpu"]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
