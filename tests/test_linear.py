"""The few-rows product equals nn.Linear's, and leaves everything else to it."""

import pytest
import torch
from torch import nn

from specresearch.models.linear import FEW, Linear, quicken


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3), (2, FEW // 2, 3), (FEW + 1, 3), (0, 3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_to_the_plain_layer(shape, bias, dtype):
    plain = nn.Linear(3, 5, bias=bias).to(dtype)
    ours = Linear(3, 5, bias=bias).to(dtype)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), plain(x))
    assert ours(x).requires_grad


def test_the_other_way_round_is_taken_for_few_rows_only(monkeypatch):
    used = []
    monkeypatch.setattr(torch, "mm", lambda a, b: used.append(b.shape[1]) or a @ b)
    layer = Linear(3, 5)
    with torch.no_grad():
        for rows in (1, 2, FEW, FEW + 1):
            layer(torch.randn(rows, 3))
    assert used == [2, FEW]


def test_quicken_changes_the_forward_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2, bias=False)))
    x = torch.randn(4, 3)
    with torch.no_grad():
        before, names = model(x), list(model.state_dict())
        quicken(model)
        assert [type(m) for m in (model[0], model[2][0])] == [Linear, Linear]
        assert list(model.state_dict()) == names
        torch.testing.assert_close(model(x), before)
