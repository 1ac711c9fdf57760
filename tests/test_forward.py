"""The forward check: a right adapter is exact, planted faults of positions, mask and cache are seen in the logits."""

import pytest
import torch

from specresearch.lossless.forward import check_forward
from specresearch.models import hf, tiny
from specresearch.models.hf import HFModel
from specresearch.types import UserError

SEQUENCES = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 23, 57)]


@pytest.fixture
def model() -> HFModel:
    return tiny.load(dtype="float32", device="cpu")


def test_a_right_forward_is_exact(model):
    found = check_forward(model, SEQUENCES)
    assert found.verdict == "exact" and found.ratio < 4
    assert len(found.by_size) == 5 and found.sequences == 3
    assert found.positions == 3 * 20, "every place of every sequence's end is compared"
    assert check_forward(model, SEQUENCES[:1]).verdict == "exact"
    assert found.as_dict()["dtype"] == "float32"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(dtype):
    found = check_forward(tiny.load(dtype=dtype, device="cpu"), SEQUENCES)
    assert found.verdict == "exact", found


def test_positions_off_by_one(model, monkeypatch):
    run = HFModel.run

    def shifted(self, tokens, positions, *rest, **kwargs):
        return run(self, tokens, positions + (kwargs.get("rows") is None), *rest, **kwargs)

    monkeypatch.setattr(HFModel, "run", shifted)
    assert check_forward(model, SEQUENCES).verdict == "fault"


def test_one_sibling_in_the_wrong_position(model, monkeypatch):
    run = HFModel.run

    def shifted(self, tokens, positions, *rest, **kwargs):
        wide = kwargs.get("rows") is None and tokens.shape[1] == 33
        return run(self, tokens, positions + wide, *rest, **kwargs)

    monkeypatch.setattr(HFModel, "run", shifted)
    found = check_forward(model, SEQUENCES)
    assert found.verdict == "fault" and found.worst["size"] == 33


def test_a_stale_cache_entry(model, monkeypatch):
    """The last accepted node of every step is not moved to its place."""
    commit = HFModel.commit

    def short(self, step, verdict):
        path = verdict.path.clone()
        path.scatter_(1, (verdict.length - 1).clamp(min=0)[:, None], -1)
        commit(self, step, type(verdict)(path, verdict.length, verdict.next_token))

    monkeypatch.setattr(HFModel, "commit", short)
    assert check_forward(model, SEQUENCES).verdict == "fault"


def test_a_mask_that_leaks_a_sibling(model, monkeypatch):
    honest = hf.ancestors

    def leaky(parent):
        mask = honest(parent).clone()
        mask[:, -1, -2] = True
        return mask

    monkeypatch.setattr(hf, "ancestors", leaky)
    found = check_forward(model, SEQUENCES)
    assert found.verdict == "fault" and found.ratio > 100


def test_rows_of_one_batch_that_see_each_others_length(model, monkeypatch):
    run = HFModel.run

    def mixed(self, tokens, positions, length, *rest, **kwargs):
        if kwargs.get("rows") is None:
            positions = positions - length[:, None] + length.flip(0)[:, None]
        return run(self, tokens, positions, length, *rest, **kwargs)

    monkeypatch.setattr(HFModel, "run", mixed)
    assert check_forward(model, SEQUENCES).verdict == "fault"
    assert check_forward(model, SEQUENCES[:1]).verdict == "exact", "one row alone has the right length"


def test_nan_is_a_fault(model, monkeypatch):
    forward = HFModel.forward

    def broken(self, step, tree, taps):
        output = forward(self, step, tree, taps)
        return type(output)(output.logits * torch.nan, output.features)

    monkeypatch.setattr(HFModel, "forward", broken)
    assert check_forward(model, SEQUENCES).verdict == "fault"


def test_too_little_to_compare(model):
    for sequences in ([], [[1, 2, 3]]):
        with pytest.raises(UserError, match="longer"):
            check_forward(model, sequences)
