"""Shared fixtures: random Llamas in float64, so that equality tests meet no rounding."""

import os
import random
from collections.abc import Iterator

# Before torch is imported, here and in processes that tests start: tiny tensors gain nothing from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels then run on the CPU when asked for

from specresearch.kernels import backend
from specresearch.models import tiny
from specresearch.models.hf import HFModel

os.environ.setdefault("WANDB_MODE", "offline")

PROMPTS = ["abcabcabcabc the cat", "x", "one two three one two three one two", "Hello, who are you? Hello, who", "zzzz"]


@pytest.fixture(scope="session")
def target() -> HFModel:
    return tiny.load(dtype="float64", device="cpu")


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another random model of the target's vocabulary, near enough to agree now and then."""
    folder = tmp_path_factory.mktemp("draft")
    own = tiny.load(dtype="float64", device="cpu")
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in own.model.parameters():
            weight += 0.15 * torch.randn(weight.shape, generator=noise, dtype=weight.dtype) * weight.std()
    own.model.save_pretrained(folder)
    own.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def triton() -> None:
    """Run the Triton kernels: on the GPU, else in Triton's interpreter."""
    backend.use(name="triton")


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    random.seed(0)
    torch.manual_seed(0)
    yield
    backend.use(name="auto")
