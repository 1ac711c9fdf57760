"""The target's features of dialogues that came without them, by plain prefill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specresearch.models.hf import HFModel
from specresearch.training import dataset
from specresearch.types import Tap


@torch.inference_mode()
def add_features(
    target: HFModel, folder: Path, taps: Sequence[Tap], progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a features file beside each shard that lacks one, whole or not at all."""
    waiting = [path for path in dataset.shards(folder) if not dataset.features_path(path).exists()]
    for number, path in enumerate(waiting):
        dialogues = dataset.read(path).dialogues
        target.reserve(1, max(len(d.tokens) for d in dialogues), 1)
        parts = []
        for d in dialogues:
            length = torch.tensor([len(d.tokens)], device=target.device)
            features = target.extend([0], torch.tensor([d.tokens], device=target.device), length, taps)[1]
            assert features is not None
            features[0, -1] = 0  # as when they are kept on the way: nobody reads the last token's
            parts.append(features[0].to(torch.bfloat16).cpu())
        dataset.save(dataset.features_path(path), {"features": torch.cat(parts)}, {"taps": json.dumps(list(taps))})
        if progress:
            progress(number + 1, len(waiting))
