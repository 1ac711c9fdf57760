"""Models spread over the ranks of a group by transformers' tensor-parallel plan: each rank reads, holds and multiplies its part
of the attention heads and of the MLP; embedding and vocabulary matrix are whole everywhere, since draft heads read them."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from specresearch.parallel import Group, current
from specresearch.types import UserError


def require_group(tp: Any) -> Group | None:
    """The group that shares a target with `target.tp=`; None for 1. Raises UserError where there are not `tp` ranks."""
    group = current()
    if type(tp) is not int or tp < 1:
        raise UserError(f"target.tp={tp}: use the number of processes that share the target, or 1")
    if tp == 1:
        return None
    if group is None or group.world != tp:
        there = "this is one process" if group is None else f"torchrun started {group.world} processes"
        raise UserError(
            f"target.tp={tp} and {there}: start it with  torchrun --nproc-per-node={tp} -m specresearch target.tp={tp} ..."
        )
    if 0 < (gpus := torch.cuda.device_count()) < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        raise UserError(f"target.tp={tp} needs a GPU for each process of a machine, and here are {gpus}")
    return group


def require_divides(config: Any, tp: int, name: str) -> None:
    """Raises UserError unless each rank gets whole heads and an equal part of the MLP."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    counts = {"heads": heads, "KV heads": getattr(text, "num_key_value_heads", None) or heads}
    if inner := getattr(text, "intermediate_size", None):
        counts["MLP columns"] = inner
    if odd := [f"{count} {what}" for what, count in counts.items() if count % tp]:
        common = math.gcd(*counts.values())
        fit = [n for n in range(2, common + 1) if common % n == 0]
        use = f"use target.tp={'|'.join(map(str, fit[:6]))}" if fit else "it cannot be split"
        raise UserError(f"{name} has {' and '.join(odd)}, which target.tp={tp} does not divide: {use}")


def load_sharded(id: str, group: Group, **kwargs: Any) -> Any:
    """Each rank reads its own part of the weights. Raises UserError for a model that cannot be split so."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(id, revision=kwargs.get("revision"))
    require_divides(config, group.world, config.model_type if "/" in id else id)
    if not getattr(config.get_text_config(), "base_model_tp_plan", None):
        raise UserError(f"transformers has no tensor-parallel plan for {config.model_type}: leave target.tp out")
    try:
        from transformers.distributed import DistributedConfig

        with torch.device("meta"):
            blank: Any = transformers.AutoModelForCausalLM.from_config(config)
        ends = (blank.get_input_embeddings(), blank.get_output_embeddings())
        whole = {name: "replicate" for name, module in blank.named_modules() if any(module is end for end in ends)}
        spread: Any = DistributedConfig(tp_size=group.world, tp_plan=whole)
    except (ImportError, TypeError):
        raise UserError(f"target.tp needs a newer transformers than {transformers.__version__}: 5.24 has it") from None
    model = transformers.AutoModelForCausalLM.from_pretrained(id, distributed_config=spread, **kwargs)
    localise(model, group)
    return model


def localise(model: Any, group: Group) -> None:
    """Make the split layers plain ones of their local size, with one sum over the ranks behind each `rowwise` one: our own
    forward and packed products then serve them as any other. Layers of other styles stay as transformers made them."""
    plan = {"*": "replicate", **model.tp_plan}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name))
        if style not in ("colwise", "rowwise", "replicate") or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        vars(module).pop("forward", None)  # transformers' wrapping
        if style == "replicate":
            continue
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                own = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
                module._parameters[key] = nn.Parameter(own.detach().contiguous(), requires_grad=False)
        module.out_features, module.in_features = module.weight.shape
        if style == "rowwise":
            if group.rank and module.bias is not None:
                module._parameters["bias"] = None  # it is added once
            module.register_forward_hook(_summed)


def _summed(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    output = output.contiguous()
    dist.all_reduce(output)
    return output
