"""Models from the Hub or a folder, and whether two of them share a vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers

from specresearch.models.hf import HFModel, one_line
from specresearch.models.linear import halve, quicken
from specresearch.models.sharded import load_sharded, require_group
from specresearch.types import UserError


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):
        raise UserError(f"target.device={device} is not to be had here: use auto, cpu or cuda") from None
    return found


def resolve_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    name = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in ("float64", "float32", "bfloat16", "float16"):
        raise UserError(f"dtype={name} is unknown: use float32, bfloat16, float16 or float64")
    return getattr(torch, name)


def load(
    *,
    id: str,
    revision: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    device_map: Any = None,
    fast: str = "auto",
    weights: str | None = None,
    tp: int = 1,
) -> HFModel:
    """A model from the Hub or a local folder. `weights` = float16: its matrices are rounded to half precision, once, and
    all arithmetic stays float32. `tp`: ranks that share it, all of which make this call. Raises UserError if it cannot be
    had or cannot be used."""
    if not isinstance(id, str) or not id:
        raise UserError(f"a model's id is a text, not {id}: use target.id=<Hub id or folder>")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries would bury the one line below
    group = require_group(tp)
    if group is not None and (device != "auto" or device_map is not None):
        raise UserError("target.tp chooses the device of each rank: leave target.device and target.device_map out")
    where = resolve_device(device)
    kwargs: dict[str, Any] = {"revision": revision, "dtype": resolve_dtype(dtype, where)}
    if weights not in (None, "float16") or (weights and kwargs["dtype"] != torch.float32):
        raise UserError(f"weights={weights}: use null, or float16 with dtype=float32")
    try:
        if device_map is not None:
            kwargs["device_map"] = device_map
        if group is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(id, **kwargs)
        else:
            model = load_sharded(id, group, **kwargs)
    except UserError:
        raise
    except Exception as error:  # broken files raise many kinds
        raise UserError(_why_not(id, error)) from None
    if device_map is None:
        model = model.to(where)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(id, revision=revision)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    if weights is not None:
        quicken(model)
        halve(model)
    return HFModel(model, tokenizer, id, fast, group)


def _why_not(id: str, error: Exception) -> str:
    if Path(id).is_dir():
        return f"the model in {id} cannot be loaded: {one_line(error)}"
    looks_local = id.startswith((".", "/", "~")) or Path(id).exists()
    if looks_local:
        return f"{id} is not a folder with a model (config.json, model.safetensors, tokenizer.json)"
    return f"model {id} is neither a local folder nor to be had from the Hub (no such id, or no network): {one_line(error)}"


def require_same_vocabulary(target: HFModel, other: HFModel, name: str) -> None:
    """Token by token, since vocabularies of one size may differ and padded ones may agree. Raises UserError."""
    if target.tokenizer is None or other.tokenizer is None:
        raise UserError(f"{name}: without both tokenizers it cannot be told whether the vocabularies agree")
    ours, theirs = target.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    odd = sorted(
        (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=lambda t: ours.get(t, 1 << 60)
    )
    if odd:
        raise UserError(
            f"{name} has another vocabulary than the target ({len(odd)} tokens differ, e.g. {odd[0]!r}: "
            f"{ours.get(odd[0])} in the target, {theirs.get(odd[0])} in the drafter): use "
            "drafter.vocab=intersection or text, or a model of the same family"
        )
