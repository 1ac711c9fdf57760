"""A small LM made of some of the target's layers, on a draft vocabulary: embedding and vocabulary matrix stay the target's and
are not stored with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specresearch.models.formats.common import SMALL_LM, misfits, require_finite
from specresearch.models.hf import HFModel, one_line
from specresearch.models.vocabulary import DraftVocabulary
from specresearch.ranges import require, several, whole
from specresearch.types import UserError

SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def student(target: HFModel, layers: Sequence[int], kept: Tensor) -> Any:
    """A model of the target's class with copies of its `layers` (and of its final norm), whose logits are of the target's
    tokens `kept` (ascending). Embedding and vocabulary matrix are the target's, frozen."""
    model = _blank(target, layers, len(kept))
    own = target.model.state_dict()
    names = {n for n, _ in model.named_parameters()} - set(SHARED)
    tensors = {name: own[_source(name, layers)].detach().clone() for name in names}
    offsets = kept.cpu() - torch.arange(len(kept))
    return _filled(model, tensors | ({"vocabulary.d2t": offsets} if model.vocabulary.reduced else {}), target)


def _blank(target: HFModel, layers: Sequence[int], draft_vocab_size: int) -> Any:
    count = len(target.blocks)
    if not layers or any(type(i) is not int or not 0 <= i < count for i in layers):
        raise UserError(f"layers={list(layers)}: {target.name} has the layers 0 to {count - 1}")
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = False
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = [config.layer_types[i] for i in layers]
    with torch.device("meta"):
        model: Any = type(target.model)(config)
        model.vocabulary = DraftVocabulary(target.vocab_size, draft_vocab_size)
    if not {n for n, _ in model.named_parameters()} >= set(SHARED) or target.head.bias is not None:
        raise UserError(
            f"{target.name} ({config.model_type}) names its vocabulary otherwise: no small LM can be made of it"
        )
    return model


def _source(name: str, layers: Sequence[int]) -> str:
    """Name in the target of what the student's tensor `name` is copied from."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)


def _filled(model: Any, tensors: Mapping[str, Tensor], target: HFModel) -> Any:
    require_finite(tensors)
    wanted = {n: t for n, t in model.state_dict().items() if n not in SHARED}
    faults = misfits(tensors, wanted)
    if faults:
        raise UserError(f"the tensors of the small LM do not fit its config: {'; '.join(faults)}")
    model.load_state_dict(dict(tensors), strict=False, assign=True)
    if model.vocabulary.reduced:
        model.vocabulary.keep(model.vocabulary.kept)  # checks the ids
        model.vocabulary.to(target.device)
    model.get_input_embeddings().weight = nn.Parameter(target.model.get_input_embeddings().weight.detach(), False)
    matrix = target.head.weight.detach()
    model.get_output_embeddings().weight = nn.Parameter(matrix[model.vocabulary.kept.to(matrix.device)], False)
    rotary = type(target.model.base_model.rotary_emb)(config=model.config)
    model.base_model.rotary_emb = rotary.to(target.device)  # its buffers are not in the state dict
    model.generation_config = target.model.generation_config
    return model


def save_student(model: Any, folder: Path, layers: Sequence[int], training: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().contiguous() for n, t in model.state_dict().items()}
    tensors = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}
    scratch = folder / "model.safetensors.tmp"
    save_file({n: t for n, t in tensors.items() if n not in SHARED}, scratch, metadata={"format": "pt"})
    scratch.replace(folder / "model.safetensors")
    vocabulary: DraftVocabulary = model.vocabulary
    config = {"format": SMALL_LM, "layers": list(layers), "draft_vocab_size": len(vocabulary.kept)}
    config |= {"from_target": list(SHARED), "training": dict(training)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_student(folder: str) -> bool:
    try:
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("format") == SMALL_LM
    except (OSError, ValueError, AttributeError):
        return False


def load_student(folder: str, target: HFModel, dtype: torch.dtype | None = None) -> HFModel:
    """What `save_student` wrote, with the target's vocabulary. Raises UserError if it does not fit."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    dtype = dtype or target.dtype
    try:
        require(config, {"draft_vocab_size": whole(), "layers": several(whole(0), "layers")}, "config.json has ")
        tensors = load_file(Path(folder) / "model.safetensors")
        tensors = {n: t.to(target.device, dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
        model = _filled(_blank(target, config["layers"], config["draft_vocab_size"]), tensors, target).to(dtype)
    except Exception as error:  # damaged files raise many kinds
        raise UserError(f"the small LM in {folder} cannot be read: {one_line(error)}") from None
    return HFModel(model, target.tokenizer, f"small LM of {target.name}")
