"""`python -m specresearch.export ckpt=DIR out=DIR format=sglang|vllm|both`: a draft head for a server, and its command line.

What is written is read back by our own loader and must be the same, bit for bit. Exit status: 0, or 1 for an error.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from specresearch import cli
from specresearch.build import make
from specresearch.models.checkpoints import Head, borrow, load_head, report, shipped, stored_dtype, write
from specresearch.models.eagle import EagleConfig
from specresearch.models.exporting import for_sglang, for_vllm
from specresearch.models.medusa import MedusaHeads
from specresearch.overrides import CONF
from specresearch.trees.dynamic import DynamicTree
from specresearch.types import TreePolicy, UserError

FORMATS = ("sglang", "vllm")


@hydra.main(config_path=CONF, config_name="export", version_base="1.3")
@cli.guarded("export")
def job(cfg: DictConfig) -> None:
    for line in export(cfg):
        print(line)


def export(cfg: DictConfig) -> list[str]:
    """Write the folders -> the command lines. Raises UserError for a head that none of the servers can load."""
    if cfg.format not in (*FORMATS, "both"):
        raise UserError(f"format={cfg.format} is unknown: use sglang, vllm or both")
    change: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)["config"]  # type: ignore[index,call-overload]
    policy, target, out = make(cfg, "tree"), make(cfg, "target"), Path(str(cfg.out))
    blocks = len(target.blocks)
    where = chosen(str(cfg.ckpt), target.name)
    try:
        head, described = load_head(where, layers=blocks, revision=cfg.revision, config=change)
    except UserError as error:
        raise UserError(str(error).replace("drafter.config", "config")) from None  # the key's name here
    report(head, described, where)
    borrow(head, target, stored_dtype(head), torch.device("cpu"))
    path = target.model.config._name_or_path or target.name
    verifier = {
        "name_or_path": path,
        "architectures": target.model.config.architectures or [type(target.model).__name__],
    }
    lines: list[str] = []
    refused: list[UserError] = []
    for form in FORMATS if cfg.format == "both" else (cfg.format,):
        try:
            written = for_sglang(head, blocks) if form == "sglang" else for_vllm(head, verifier, policy.depth)
        except UserError as error:
            refused.append(error)
            continue
        write(out / form, *written)
        verify(head, out / form, blocks)
        lines.append(sglang_line(head, path, out, policy) if form == "sglang" else vllm_line(head, path, out, policy))
    if not lines:
        raise UserError("; ".join(map(str, refused)))
    for reason in refused:
        print(f"warning: not written: {reason}", file=sys.stderr)
    return lines


def chosen(ckpt: str, target: str) -> str:
    """The folder or id of the head. `auto` = the EAGLE head that is shipped for the target."""
    if ckpt != "auto":
        return ckpt
    try:
        return shipped("eagle", target)
    except UserError:
        raise UserError(
            f"ckpt=auto: nothing is shipped for target {target}: give the folder of a head, e.g. (for target=smollm2) "
            "ckpt=checkpoints/smollm2/eagle3"
        ) from None


def verify(head: Head, folder: Path, blocks: int) -> None:
    """Read it back. Raises RuntimeError if a tensor or the config came out differently."""
    change = {"norm_output": head.config.norm_output} if isinstance(head.config, EagleConfig) else None
    again, _ = load_head(str(folder), layers=blocks, config=change)
    whole, config = head.state_dict(), again.config
    stored = {name: t for name, t in again.state_dict().items() if name not in config.from_target}
    added = stored.keys() - whole.keys()  # EAGLE-1's fc.bias of zeros, for a server that always has one
    same: dict[str, Any] = {"from_target": head.config.from_target} | ({"bias": False} if added else {})
    right = all(not t.any() if name in added else torch.equal(t, whole[name]) for name, t in stored.items())
    if not right or replace(config, **same) != head.config:
        raise RuntimeError(f"{folder} does not read back as what was written")


def sglang_line(head: Head, target: str, folder: Path, policy: TreePolicy) -> str:
    """SGLang grows EAGLE-2's tree itself: steps, children per node, and nodes verified with the root counted."""
    nodes = policy.depth + 1 if policy.width == 1 else policy.size
    if not isinstance(policy, DynamicTree) and policy.width > 1:
        print(
            f"warning: SGLang grows a dynamic tree, not a {type(policy).__name__}: the same depth and size",
            file=sys.stderr,
        )
    method = "EAGLE3" if head.config.taps != ("norm",) else "EAGLE"
    options = {"algorithm": method, "draft-model-path": folder / "sglang", "num-steps": policy.depth}
    options |= {"eagle-topk": policy.width, "num-draft-tokens": nodes}
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    return shlex.join([*words, *(str(w) for k, v in options.items() for w in (f"--speculative-{k}", v))])


def vllm_line(head: Head, target: str, folder: Path, policy: TreePolicy) -> str:
    """vLLM drafts chains only."""
    steps = head.config.heads if isinstance(head, MedusaHeads) else policy.depth
    if policy.width > 1:
        print(f"warning: vLLM drafts no trees: its command line has a chain of {steps}", file=sys.stderr)
    method = "medusa" if isinstance(head, MedusaHeads) else "eagle3" if head.config.version == 3 else "eagle"
    settings = {"method": method, "model": str(folder / "vllm"), "num_speculative_tokens": steps}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])


def main() -> None:
    """Entry point of `python -m specresearch.export`."""
    cli.run(job, "export")


if __name__ == "__main__":
    main()
