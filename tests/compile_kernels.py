"""Compile every Triton kernel for a Hopper GPU, which needs none: `python tests/compile_kernels.py`.

Prints registers, stack (where spills go) and shared memory of each. The interpreter that the other tests use lets pass much
that the compiler refuses; TRITON_INTERPRET must be unset here.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specresearch.kernels import attention, cache, sampling, tree, verify

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED = 227 * 1024  # bytes a Hopper block may have


def signature(kernel, types: dict, constants: dict) -> dict:
    """Types of the arguments by name; int32 where nothing is said."""
    return {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}


def cases():
    """(name, kernel, types of the arguments, constants, warps)"""
    long = dict.fromkeys(
        ("parent", "count", "child", "sibling", "tokens", "first", "path", "length", "following"), "*i64"
    )
    for nodes in (64, 1024):
        kinds = {**long, "valid": "*i1", "words": "*i32"}
        yield f"structure n={nodes}", tree._structure, kinds, {"VALID": True, "WORDS": nodes // 32, "TILE": 32}, 4
    for dtype in ("*bf16", "*fp32"):
        kinds = {"buffer": dtype, "source": "*i64", "target": "*i64"}
        yield f"move {dtype}", cache._move, kinds, {"PAIRS": 8, "BLOCK": 512}, 4
    floats = dict.fromkeys(("temperature", "top_k", "drop", "min_p"), "fp32")
    for greedy, top_k, top_p in ((True, False, False), (False, False, False), (False, True, True)):
        constants = {"GREEDY": greedy, "TOP_K": top_k, "TOP_P": top_p, "BLOCK": 1024}
        yield f"warp {constants}", sampling._warp, {"logits": "*bf16", "out": "*fp32", **floats}, constants, 8
    for mass in (False, True):
        kinds = {"probs": "*fp32", "out": "*fp32", "want": "*fp64"}
        yield f"renorm mass={mass}", sampling._renorm, kinds, {"MASS": mass, "BLOCK": 1024}, 8
    yield "pick", sampling._pick, {"weights": "*fp32", "uniform": "*fp64", "out": "*i64"}, {"BLOCK": 1024}, 4
    laws = dict.fromkeys(("p", "q", "scratch"), "*fp32") | {"coins": "*fp64", "final": "*fp64"}
    for kind in range(5):
        kinds = {**long, **laws, "single": "fp32", "acc": "fp32"} | (
            {"p": "*i64", "q": "*i64", "scratch": "*i64"} if kind == 0 else {}
        )
        constants = {"KIND": kind, "DEAD": kind > 0, "NODES": 64, "BLOCK": 1024}
        yield f"walk kind={kind}", verify._walk, kinds, constants, 1 if kind == 0 else 8
    for dtype, width, tile, block, warps in (
        ("*bf16", 64, 64, 64, 4),
        ("*bf16", 128, 128, 64, 8),
        ("*fp32", 64, 32, 32, 8),
    ):
        kinds = dict.fromkeys(("query", "key", "value", "out"), dtype) | {
            "words": "*i32",
            "length": "*i64",
            "scale": "fp32",
        }
        kinds |= {"partial": "*fp32", "weight": "*fp32"}
        constants = {"GROUP": 4, "D": width, "E": width, "TILE": tile, "BLOCK": block, "SPLIT": True, "WIDEN": False}
        constants["PRECISION"] = "ieee" if dtype == "*fp32" else "tf32"
        yield f"attend {dtype} d={width}", attention._attend, kinds, constants, warps
    kinds = {"partial": "*fp32", "weight": "*fp32", "out": "*bf16"}
    yield "combine", attention._combine, kinds, {"E": 128, "SPLITS": 32}, 1
    yield "chain", verify._chain, {**long, **laws, "coins": "*fp32"}, {"BLOCK": 1024}, 8


def compiled(kernel, types: dict, constants: dict, warps: int) -> tuple[int, int, int]:
    """-> registers a thread, bytes of stack (spills and calls), bytes of shared memory"""
    kinds = signature(kernel, types, constants)
    aligned = [["tt.divisibility", 16]]  # what the launcher sees of pointers, strides and sizes
    even = {"vocab", "width", "key_width", "value_width"} | {
        n for n in kinds if n.endswith(("_row", "_head", "_node", "_slot"))
    }
    attrs = {(i,): aligned for i, (name, kind) in enumerate(kinds.items()) if kind[0] == "*" or name in even}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=attrs)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", said)[1]) for what in ("REG", "STACK"))
    return registers, stack, made.metadata.shared


def main() -> int:
    failed = 0
    for name, kernel, types, constants, warps in cases():
        registers, stack, shared = compiled(kernel, types, constants, warps)
        failed += stack > 64 or shared > SHARED
        print(f"{name:70} {registers:4} registers  {stack:4} bytes of stack  {shared:6} bytes shared")
    return failed


if __name__ == "__main__":
    sys.exit(main())
