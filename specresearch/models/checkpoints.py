"""Draft heads on disk: read any known form strictly, write ours, fit a head to its target."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specresearch.models.eagle import EagleConfig, EagleHead
from specresearch.models.formats import describe, to_json
from specresearch.models.formats.common import Described, Tensors, misfits
from specresearch.models.hf import HFModel, one_line
from specresearch.models.linear import halve
from specresearch.models.loading import resolve_dtype
from specresearch.models.medusa import MedusaHeads
from specresearch.types import UserError

Head = EagleHead | MedusaHeads
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
SHARDS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def load_head(
    where: str, *, layers: int, revision: str | None = None, config: Mapping[str, Any] | None = None
) -> tuple[Head, Described]:
    """A head from a folder or the Hub, in the dtype it was stored in. What it takes from its target has no data yet.

    `layers` = blocks of the target; `config` = fields of our config that the user sets himself. Raises UserError for
    unknown forms, unsupported variants, and, in one list, all tensors that are missing, unexpected or misshapen.
    """
    if config is not None and not isinstance(config, Mapping):
        raise UserError(f"drafter.config={config}: use a mapping, e.g. 'drafter.config={{taps: [2, 15, 27]}}'")
    folder = fetch(where, revision)
    try:
        described = describe(read_config(folder), read_tensors(folder), layers, config)
        return assemble(described), described
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{where}: its config.json or its tensors are damaged ({reason})") from error


def assemble(described: Described) -> Head:
    """Strictly: every tensor that the config asks for, in its shape, and no other."""
    config, given = described.config, dict(described.tensors)
    with torch.device("meta"):
        head: Head = EagleHead(config) if isinstance(config, EagleConfig) else MedusaHeads(config)
    wanted = {k: v for k, v in head.state_dict().items() if k not in config.from_target}
    member = given.pop("t2d", None)
    faults = misfits(given, wanted)
    if faults:
        raise UserError(f"its tensors do not fit its config ({described.format}): {'; '.join(faults)}")
    head.load_state_dict(given, strict=False, assign=True)
    vocabulary = head.vocabulary
    if vocabulary.reduced:
        vocabulary.keep(vocabulary.kept.long())
        if member is not None and not torch.equal(member.bool(), vocabulary.t2d):
            raise UserError("d2t and t2d contradict each other: d2t must hold offsets (target id = draft id + d2t)")
    return head.requires_grad_(False)


def save_head(head: Head, folder: Path | str, training: Mapping[str, Any] | None = None) -> None:
    """Our own form: config.json and model.safetensors, without what the config declares to be the target's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = to_json(head.config) | ({"training": dict(training)} if training else {})
    tensors = {_outside(n): t for n, t in head.state_dict().items() if n not in head.config.from_target}
    write(folder, config, tensors)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Moved into place one after the other, so that a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "model.safetensors.tmp"
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, scratch, metadata={"format": "pt"})
    scratch.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _outside(name: str) -> str:
    return "d2t" if name == "vocabulary.d2t" else name


def fit_to(head: Head, target: HFModel, dtype: torch.dtype | None = None) -> None:
    """Give the head what it takes from `target`, and move it there. Raises UserError if they do not belong together."""
    dtype = dtype or target.dtype
    borrow(head, target, dtype, target.device)
    head.to(device=target.device, dtype=dtype)


def borrow(head: Head, target: HFModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give the head what it takes from `target`. Raises UserError if they do not belong together."""
    config: Any = head.config
    wide = getattr(config, "target_hidden_size", config.hidden_size)
    embedding, output, blocks = target.model.get_input_embeddings().weight, target.head, len(target.blocks)
    if config.vocab_size not in (target.vocab_size, target.embedded):
        raise UserError(f"the head is for a vocabulary of {config.vocab_size}, {target.name} has {target.vocab_size}")
    if wide != output.in_features:
        raise UserError(f"the head reads features of width {wide}, those of {target.name} have {output.in_features}")
    if far := [t for t in config.taps if isinstance(t, int) and not 0 <= t <= blocks]:
        raise UserError(f"the head reads the residual stream after block {far[0]}, {target.name} has {blocks} blocks")
    if "lm_head.weight" in config.from_target and output.bias is not None:
        raise UserError(f"the head uses the vocabulary matrix of {target.name}, which has a bias: not supported")
    head.adopt(*(weight.to(device=device, dtype=dtype) for weight in (embedding, output.weight)))


def stored_dtype(head: Head) -> torch.dtype:
    """Of the tensors that are the head's own."""
    return next(p.dtype for p in head.parameters() if not p.is_meta)


def fitted_head(
    kind: str,
    target: Any,
    ckpt: str,
    revision: str | None = None,
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Head:
    """What `drafter=eagle|medusa` drafts with: loaded, said in one line, fitted to its target. `ckpt=auto`: the shipped one."""
    if not isinstance(target, HFModel):
        raise UserError(f"drafter={kind} needs a Hugging Face target: use target=hf or target=smollm2")
    if not isinstance(ckpt, str) or not ckpt:
        raise UserError(f"drafter.ckpt={ckpt}: give a folder, a Hub id or auto")
    where = shipped(kind, target.name) if ckpt == "auto" else ckpt
    head, described = load_head(where, layers=len(target.blocks), revision=revision, config=config)
    report(head, described, where)
    fit_to(head, target, resolve_dtype(dtype, target.device) if dtype else None)
    if target.half:
        halve(head)
    return head


def shipped(kind: str, target: str) -> str:
    """Folder of the trained head that comes with the package for a target. Raises UserError if there is none."""
    room = Path(__file__).resolve().parents[1] / "checkpoints"
    folder = room / target / {"eagle": "eagle3"}.get(kind, kind)
    if re.fullmatch(r"[\w-]+", target) and (folder / "config.json").exists():
        return str(folder)
    raise UserError(
        f"nothing is shipped for target {target} and drafter={kind}: use drafter=ngram, give drafter."
        f"{'id' if kind == 'small_lm' else 'ckpt'}=FOLDER or a Hub id, or train one: "
        f"python -m specresearch.train drafter={kind} target=..."
    )


def report(head: Head, described: Described, where: str) -> None:
    """One line on stderr: what was loaded, and how its features were understood."""
    c = head.config
    kind = f"EAGLE-{c.version} head" if isinstance(c, EagleConfig) else f"{c.heads} Medusa heads"
    words = [f"{kind} from {where} ({described.format})", *described.notes, f"taps {', '.join(map(str, c.taps))}"]
    words.append(f"draft vocabulary {c.draft_vocab_size} of {c.vocab_size}")
    print("drafter: " + "; ".join(words), file=sys.stderr)


# -- files ---------------------------------------------------------------------------------------------------------------


def fetch(where: str, revision: str | None = None) -> Path:
    """A local folder as it is, else a download from the Hub: weights and config only, never code."""
    if Path(where).expanduser().is_dir():
        return Path(where).expanduser()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", where):
        raise UserError(f"{where} is no folder with a draft head, and no id of the Hub either")
    from huggingface_hub import snapshot_download

    try:
        wanted = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt"]
        return Path(snapshot_download(where, revision=revision, allow_patterns=wanted))
    except Exception as error:  # no such id, no network, no right to see it
        raise UserError(f"{where} is no local folder and not to be had from the Hub: {one_line(error)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"config.json cannot be read ({one_line(error)})") from None
    if not isinstance(config, dict):
        raise UserError("config.json is no mapping")
    return config


def read_tensors(folder: Path) -> Tensors:
    """All tensors of the folder. Nothing is unpickled but plain tensors."""
    for index in SHARDS:
        if (folder / index).exists():
            return {k: v for name in _shards(folder / index) for k, v in _read(folder / name).items()}
    for name in WEIGHTS:
        if (folder / name).exists():
            return _read(folder / name)
    raise UserError(f"no weights there: {', '.join(WEIGHTS)} are looked for")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if all(Path(name).name == name for name in names):
            return names
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{index.name} names no files of this folder")


def _read(path: Path) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from None
    except Exception as error:  # pickle.UnpicklingError: it holds more than tensors
        raise UserError(
            f"{path.name} is refused, since it holds more than tensors (running it would run its author's code): "
            f"{one_line(error)}"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{path.name} is no state dict: a flat mapping of names to tensors is needed")
    return tensors
