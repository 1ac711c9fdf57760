"""The packed product equals nn.Linear's, follows its weight, and leaves everything else to it."""

import copy

import pytest
import torch
from torch import nn

from specresearch.models import linear
from specresearch.models.linear import Linear, quicken


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3), (2, 4, 3), (200, 3), (0, 3)])
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
    assert (ours.packed is not None) == (dtype == torch.float32 and x.numel() > 0)


def test_the_packed_weight_follows_the_weight():
    layer, x = Linear(3, 5), torch.randn(2, 3)
    with torch.no_grad():
        layer(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)
        layer.weight = nn.Parameter(torch.randn(5, 3))
        torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)
        first = layer.packed.product
        layer(x)
        assert layer.packed.product is first
        torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


def test_rows_do_not_depend_on_their_number():
    layer, x = Linear(576, 300), torch.randn(16, 576)
    with torch.no_grad():
        together = layer(x)
        assert all(torch.allclose(layer(x[i : i + 1])[0], together[i], atol=1e-6) for i in range(16))


def test_quicken_changes_the_forward_alone(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2, bias=False)))
    x = torch.randn(4, 3)
    with torch.no_grad():
        before, names = model(x), list(model.state_dict())
        monkeypatch.setattr(linear, "MOST", 79)
        quicken(model)
        assert type(model[0]) is nn.Linear
        monkeypatch.setattr(linear, "MOST", 80)
        quicken(model)
        assert [type(m) for m in (model[0], model[2][0])] == [Linear, Linear]
        assert list(model.state_dict()) == names
        torch.testing.assert_close(model(x), before)
