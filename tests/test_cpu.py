"""What is compiled for CPUs: equal to what torch gives, row by row, and dispensable."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specresearch.kernels import backend, cpu
from specresearch.models import linear

needed = pytest.mark.skipif(not cpu.serves(), reason="needs an x86 CPU with AVX2 and a C++ compiler")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@needed
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("out", "width"), [(960, 576), (576, 1536), (7, 13), (4, 8), (1, 1), (2050, 24)])
def test_equal_to_the_exact_product_and_a_row_to_itself_alone(out, width, bias):
    """Summed in float32, so that what is left is rounding; bit by bit the same with any rows beside it."""
    weight, bias = torch.randn(out, width).half().float(), torch.randn(out) if bias else None
    packed, x = cpu.pack(weight, bias), torch.randn(200, width)
    alone = torch.cat([cpu.half_linear(row[None], *packed, out) for row in x])
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(alone.double(), exact, rtol=0, atol=4e-6 * (1 + width**0.5))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 96, 97, 98, 200):
        assert torch.equal(cpu.half_linear(x[:rows], *packed, out), alone[:rows]), rows
        assert torch.equal(cpu.half_linear(x[-rows:], *packed, out), alone[-rows:]), rows


@needed
def test_shapes_strides_and_threads_make_no_difference():
    weight, x = torch.randn(50, 16).half().float(), torch.randn(4, 6, 16)
    packed, threads = cpu.pack(weight, None), torch.get_num_threads()
    whole = cpu.half_linear(x, *packed, 50)
    assert whole.shape == (4, 6, 50) and cpu.half_linear(x[:0], *packed, 50).shape == (0, 6, 50)
    assert torch.equal(cpu.half_linear(x.transpose(0, 1), *packed, 50), whole.transpose(0, 1))
    large, few = cpu.pack(torch.randn(9000, 64), None), torch.randn(5, 64)
    before = cpu.half_linear(few, *large, 9000)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(cpu.half_linear(few, *large, 9000), before), "each sum is one thread's"
    finally:
        torch.set_num_threads(threads)


@needed
@pytest.mark.parametrize("width", [576, 64, 13, 1])
def test_the_norm_is_torchs(width):
    x, weight = torch.randn(3, 5, width) * 7, torch.randn(width)
    ours = cpu.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ours, F.rms_norm(x, [width], weight, 1e-5))
    assert torch.equal(cpu.rms_norm(x.transpose(0, 1), weight, 1e-5), ours.transpose(0, 1))
    assert torch.equal(cpu.rms_norm(x[1, 2], weight, 1e-5), ours[1, 2]), "a row by itself"
    assert torch.isfinite(cpu.rms_norm(x * 0, weight, 1e-5)).all()
    for wrong in (weight.double(), weight[:-1], weight.repeat(2)):
        with pytest.raises(RuntimeError):
            cpu.rms_norm(x, wrong, 1e-5)


@needed
def test_what_is_no_packed_matrix_is_refused():
    packed, _ = cpu.pack(torch.randn(8, 16), None)
    x = torch.randn(2, 16)
    for wrong in (
        (x.double(), packed, None, 8),
        (x[:, :8], packed, None, 8),
        (x, packed.float(), None, 8),
        (x, packed[0], None, 8),
        (x, packed, None, 9),
        (x, packed, torch.zeros(7), 8),
        (x, packed, torch.zeros(1).expand(8), 8),
        (x, packed.transpose(2, 3).contiguous(), None, 8),
        (x[:, :0], packed[:, :0], None, 8),
    ):
        with pytest.raises(RuntimeError):
            cpu.half_linear(*wrong)


def halved(out=12, width=24):
    layer = linear.Linear(width, out)
    linear.halve(nn.Sequential(layer))
    return layer


@needed
def test_layers_use_it_unless_torch_is_asked_for(monkeypatch):
    x, layer = torch.randn(5, 24), halved()
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double()).float()
    torch.testing.assert_close(layer(x), exact)
    assert isinstance(layer.packed.product, linear.Half)
    assert isinstance(linear.product(layer, halved()), linear.Half)
    monkeypatch.setattr(backend, "_chosen", ["torch"])
    assert isinstance(linear.product(layer), linear.Quantized)
    torch.testing.assert_close(linear.product(layer)(x), exact)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (ValueError("No closing quotation"), "No closing quotation"),
        (PermissionError(13, "Permission denied", "/cache"), "Permission denied"),
        (
            subprocess.CalledProcessError(1, "c++", stderr="in file\ncpu.cpp:1: error: no such header\n"),
            "no such header",
        ),
        (RuntimeError("undefined symbol"), "undefined symbol"),
    ],
)
def test_without_it_everything_goes_on_and_says_so_once(fault, says, monkeypatch, capsys):
    def fails():
        raise fault

    cpu._loaded.cache_clear()
    monkeypatch.setattr(cpu, "_compiled", fails)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    try:
        layer, x = halved(), torch.randn(2, 24)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        assert not cpu.serves() and not isinstance(layer.packed.product, linear.Half)
        (line,) = capsys.readouterr().err.splitlines()
        assert "cpu.cpp cannot be used" in line and says in line
    finally:
        cpu._loaded.cache_clear()


@needed
def test_compiled_once_and_anew_for_another_source_or_a_damaged_file(tmp_path, monkeypatch):
    calls = []

    def compile_(command, **_):
        calls.append(command)
        Path(command[-1]).write_bytes(b"library")

    monkeypatch.setattr(cpu.subprocess, "run", compile_)
    monkeypatch.setattr(cpu, "cache_dir", lambda: tmp_path / "cache")
    first = cpu._compiled()
    assert cpu._compiled() == first and len(calls) == 1 and first.exists()
    first.write_bytes(b"lib")
    assert cpu._compiled() == first and len(calls) == 2 and first.read_bytes() == b"library"
    monkeypatch.setattr(cpu, "SOURCE", tmp_path / "other.cpp")
    cpu.SOURCE.write_text("other")
    assert cpu._compiled() != first and len(calls) == 3
    assert {path.suffix for path in first.parent.iterdir()} == {".so"}, "nothing half made is left"
    monkeypatch.setenv("CXX", "ccache nonesuch")
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="there is no ccache to compile it"):
        cpu._compiled()


@needed
def test_finer_weights_that_are_loaded_later_are_not_rounded():
    with torch.inference_mode(False), torch.no_grad():
        layer, x = halved(), torch.randn(2, 24)
        layer(x)
        assert isinstance(layer.packed.product, linear.Half)
        layer.load_state_dict(nn.Linear(24, 12).state_dict())
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=0, atol=1e-5)
        assert isinstance(layer.packed.product, linear.Single)


@needed
def test_a_gradient_is_not_lost_in_silence():
    packed, bias = cpu.pack(torch.randn(8, 16), None)
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.randn(2, 16, requires_grad=True)
        for work in (
            lambda: cpu.half_linear(x, packed.clone(), bias, 8),
            lambda: cpu.rms_norm(x, torch.ones(16), 1e-5),
        ):
            with pytest.raises(RuntimeError, match="no gradient"):
                work()


def test_layers_with_and_without_a_bias_may_share_a_product():
    x, layers = torch.randn(3, 24), (linear.Linear(24, 12), linear.Linear(24, 8, bias=False))
    torch.testing.assert_close(linear.product(*layers)(x), torch.cat([layer(x) for layer in layers], -1))
