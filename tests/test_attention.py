"""Tree attention against plain attention in float64 with a mask written cell by cell; and models that run on it. Triton is
compiled on a GPU, else interpreted."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM

from specresearch.kernels import attention, backend
from specresearch.kernels.mask import pack_words
from specresearch.models import attention as takeover
from specresearch.models import hf, tiny
from specresearch.models.hf import HFModel
from specresearch.types import UserError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(backend.triton is None, reason="Triton is not installed")


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def kernels(request):
    backend.use(name=request.param)
    yield request.param
    backend.use(name="auto")


def case(
    nodes, lengths, group=1, width=16, value_width=None, dtype=torch.float32, kv_heads=2, start=0, spare=3, seed=0
):
    """Random queries, a random mask over `start` draft slots and the nodes, and K and V as the slot cache shows them."""
    generator = torch.Generator().manual_seed(seed)
    batch, value_width, seen = len(lengths), value_width or width, start + nodes
    slots = max(lengths) + seen
    query = torch.randn(batch, nodes, kv_heads * group, width, generator=generator)
    cached = torch.randn(batch * (slots + spare), kv_heads, width + value_width, generator=generator)
    mask = torch.rand(batch, nodes, seen, generator=generator) < 0.3
    mask[:, torch.arange(nodes), start + torch.arange(nodes)] = True
    both = cached.to(DEVICE, dtype).view(batch, slots + spare, kv_heads, -1)[:, :slots].transpose(1, 2)
    query = query.to(DEVICE, dtype).transpose(1, 2)
    length = torch.tensor(lengths, device=DEVICE)
    return SimpleNamespace(
        query=query, key=both[..., :width], value=both[..., width:], mask=mask.to(DEVICE), length=length
    )


def compute(c, **changed):
    c = SimpleNamespace(**{**vars(c), **changed})
    words = pack_words(c.mask)
    return attention.tree_attention(c.query, c.key, c.value, words, c.length)


def expected(c):
    """By torch in float64, head by head, from the same rounded inputs -> [B, n, Hq, e]"""
    batch, heads, nodes, _ = c.query.shape
    group, slots = heads // c.key.shape[1], c.key.shape[2]
    seen = torch.zeros(batch, 1, nodes, slots, dtype=torch.bool)
    for row, length in enumerate(c.length.tolist()):
        seen[row, 0, :, :length] = True
        for node, columns in enumerate(c.mask[row].cpu()):
            for column in columns.nonzero().flatten().tolist():
                seen[row, 0, node, length + column] = True
    key, value = (x.cpu().double().repeat_interleave(group, 1) for x in (c.key, c.value))
    out = scaled_dot_product_attention(c.query.cpu().double(), key, value, attn_mask=seen)
    return out.transpose(1, 2)


def error(c, out):
    """In units of what rounding explains: the output is a mean of values, weighed by exponentials of the scores.

    float32: each score is off by a few ulps of the largest, and so is each weight, relatively. Half precision: the
    products are exact in float32, but the weights and the output are rounded to the type, half an ulp each.
    """
    eps = torch.finfo(c.query.dtype).eps
    largest = c.query.double().norm(dim=-1).max() * c.key.double().norm(dim=-1).max() / math.sqrt(c.query.shape[-1])
    bound = eps * (4 + float(largest) if eps < 1e-6 else 1.5) * float(c.value.abs().max())
    assert out.dtype == c.query.dtype and out.is_contiguous()
    return float((out.cpu().double() - expected(c)).abs().max()) / bound


RAGGED = {  # nodes, lengths, group, width, width of a value
    "one node": (1, [0, 70, 9], 3, 16, None),
    "one node, one row": (1, [200], 4, 80, None),
    "one word": (8, [5, 64, 130], 1, 64, None),
    "a full word": (32, [31, 0], 3, 16, None),
    "two words": (33, [70, 1], 1, 80, None),
    "three words, tiles of rows": (70, [65], 4, 16, None),
    "five words": (130, [40], 1, 16, None),
    "narrow values": (5, [20, 3], 3, 24, 16),
    "four numbers a head": (6, [7, 90], 1, 4, None),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batches(kernels, name):
    nodes, lengths, group, width, value_width = RAGGED[name]
    c = case(nodes, lengths, group, width, value_width, kv_heads=1 if nodes > 8 else 2)
    assert error(c, compute(c)) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["one node", "one word", "two words", "narrow values"])
def test_half_precision(kernels, name, dtype):
    nodes, lengths, group, width, value_width = RAGGED[name]
    c = case(nodes, lengths, group, width, value_width, dtype, kv_heads=1)
    assert error(c, compute(c)) < 1


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_strided_heads(kernels, name):
    """A linear layer that multiplies the other way round hands over transposed memory."""
    c = case(8, [5, 64], 3, 16)
    strided = {name: getattr(c, name).mT.contiguous().mT}
    assert error(c, compute(c, **strided)) < 1


@needs_triton
@pytest.mark.parametrize("splits", [2, 8])
def test_a_split_prefix_is_put_together_again(triton, monkeypatch, splits):
    """Long and short rows: at 8 splits most parts of the short ones are empty. Scores grow along the prefix, so that the
    parts have maxima that differ by far."""
    monkeypatch.setattr(attention, "splits_for", lambda *_: splits)
    c = case(6, [600, 70, 0], group=3, kv_heads=1)
    slope = torch.linspace(0.1, 4, c.key.shape[2], device=DEVICE)[:, None]
    c.key = c.key * slope
    assert error(c, compute(c)) < 1


def test_splits_fill_the_device_and_no_more():
    assert attention.splits_for(8, 8192, 132) == 32
    assert attention.splits_for(64, 8192, 132) == 4
    assert attention.splits_for(300, 8192, 132) == 1
    assert attention.splits_for(8, 500, 132) == 1
    assert attention.splits_for(8, 1100, 132) == 4


def test_draft_slots_before_the_nodes(kernels):
    """A drafter's frontier: 3 nodes behind 40 that were asked earlier."""
    c = case(3, [17, 50], group=3, start=40)
    assert error(c, compute(c)) < 1


def test_a_chunk_of_a_prompt(kernels):
    c = case(40, [64, 64], group=2, kv_heads=1)
    c.mask = torch.ones(40, 40, device=DEVICE).bool().tril().expand(2, -1, -1)
    assert error(c, compute(c)) < 1


def test_rows_that_see_nothing_are_zero_and_rows_are_strangers(kernels):
    c = case(5, [0, 30, 0], group=3)
    before = compute(c)
    c.mask[0] = False
    c.value[2] = c.key[2] = torch.nan
    out = compute(c)
    assert torch.equal(out[1], before[1])
    assert (out[0] == 0).all() and out[2].isnan().all()


def test_one_mask_for_many_calls(kernels):
    c = case(5, [4, 30], group=3)
    dense = attention.additive(c.mask, c.length, c.key.shape[2], c.query.dtype)
    out = attention.tree_attention(c.query, c.key, c.value, None, c.length, dense=dense)
    assert torch.equal(out, compute(c)) or kernels == "triton"
    assert error(c, out) < 1
    folded = attention.on_torch(c.query, c.key, c.value, dense, 0.25, fold=True)
    assert error(c, folded) < 1


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_scale_is_the_models(kernels, nodes):
    c = case(nodes, [9, 40], group=3)
    out = attention.tree_attention(c.query, c.key, c.value, pack_words(c.mask), c.length, scale=0.7)
    c.query = c.query * (0.7 * math.sqrt(16))
    assert error(c, out) < 1


@needs_triton
@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 16), (torch.float32, 260)])
def test_torch_computes_what_the_kernel_does_not(triton, dtype, width):
    c = case(3, [5], width=width, dtype=dtype)
    assert error(c, compute(c)) < 1


@pytest.mark.parametrize("nodes", [6, 40])
def test_faults_would_be_seen(kernels, nodes):
    """Each is what a wrong index would do; all lie far outside what rounding explains."""
    c = case(nodes, [70, 33] if nodes < 20 else [33], group=3)
    assert error(c, compute(c)) < 1
    sibling = c.mask.clone()
    sibling[-1, 2, 1] ^= True
    shifted = c.mask.roll(1, -1) if nodes <= 32 else c.mask.roll(32, -1)
    for fault in (
        {"mask": sibling},
        {"mask": shifted},
        {"mask": c.mask.roll(1, 1)},
        {"length": c.length - 1},
        {"length": c.length + 1},
        {"key": c.key.roll(1, 1)},
    ):
        assert error(c, compute(c, **fault)) > 10, fault.keys()


# -- in a model --------------------------------------------------------------------------------------------------------


def llama(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 257}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "eos_token_id": 256, **options})).to(DEVICE)


def adapt(model, kernels="auto", make=None, fast="off"):
    backend.use(name=kernels)
    try:
        return make(model, 1) if make else HFModel(model, tiny.byte_tokenizer(), "model-x", fast)
    finally:
        backend.use(name="auto")


@torch.inference_mode()
def passes(model):
    """Logits of a ragged prefill, of a tree pass behind it, and of two more nodes behind its first four (a frontier)."""
    prompts = (torch.arange(2 * 9, device=DEVICE).view(2, 9) * 37) % 256
    length = torch.tensor([9, 4], device=DEVICE)
    model.reserve(2, 20, 8)
    first, _ = model.extend([0, 1], prompts, length, ())
    parent = [-1, 0, 0, 1, 1, 2]
    seen = torch.eye(6, dtype=torch.bool, device=DEVICE)
    for node in range(1, 6):
        seen[node] |= seen[parent[node]]
    positions = length[:, None] + seen.sum(-1) - 1
    nodes = (torch.arange(12, device=DEVICE).view(2, 6) * 11) % 256
    tree, _ = model.run(nodes, positions, length, seen.expand(2, -1, -1), 9)
    frontier, _ = model.run(nodes[:, 4:], positions[:, 4:], length, seen[4:].expand(2, -1, -1), 9, start=4)
    assert torch.allclose(frontier, tree[:, 4:], atol=1e-4)
    return first, tree, frontier


@needs_triton
@pytest.mark.parametrize("fast", ["auto", "off"])
def test_models_give_the_same_logits_on_triton(monkeypatch, fast):
    """The whole model, and its first layer alone."""
    calls = []
    inner = attention._triton
    monkeypatch.setattr(attention, "_triton", lambda *args: calls.append(1) or inner(*args))
    whole = adapt(llama(num_key_value_heads=1), "triton", fast=fast)
    early = adapt(whole, "triton", HFModel.first_layers)
    for model, layers in ((whole, 2), (early, 1)):
        results = []
        for name in ("triton", "torch"):
            calls.clear()
            backend.use(name=name)
            results.append(passes(model))
            backend.use(name="auto")
            assert len(calls) == (3 * layers if name == "triton" else 0)
        for fused, plain in zip(*results, strict=True):
            assert (fused - plain).abs().max() < 1e-5 * plain.abs().max()


def test_a_model_is_as_it_was_between_passes():
    model = llama()
    ids = torch.arange(12, device=DEVICE)[None]
    adapter = adapt(model)
    with torch.no_grad():
        before = model(ids).logits
    assert adapter.ours and model.config._attn_implementation == "sdpa"
    passes(adapter)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    with pytest.raises(IndexError):
        adapter.run(ids, ids, ids[:, 0], torch.ones(1, 12, 12, device=DEVICE).bool(), 0, taps=(9,), keep=ids[:, 99])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("padded", [False, True])
def test_without_a_tree_it_is_transformers_own_attention(padded):
    ids = torch.arange(24, device=DEVICE).view(2, 12)
    seen = torch.ones_like(ids)
    if padded:
        seen[1, :5] = 0
    own, ours = llama(), llama(attn_implementation=takeover.NAME)
    assert ours.config._attn_implementation == takeover.NAME
    with torch.no_grad():
        assert torch.equal(own(ids, attention_mask=seen).logits, ours(ids, attention_mask=seen).logits)
    for model in (own, ours):
        model.generation_config.pad_token_id = 0
    args = {"attention_mask": seen, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(own.generate(ids, **args), ours.generate(ids, **args))


def falcon():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
    return FalconForCausalLM(FalconConfig(**sizes, bos_token_id=None, eos_token_id=256)).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("make", [falcon, lambda: llama(attn_implementation="eager")], ids=["falcon", "eager"])
def test_models_with_another_attention_keep_it(make):
    model = make()
    own = model.config._attn_implementation
    adapter = adapt(model)
    assert not adapter.ours and model.config._attn_implementation == own
    passes(adapter)
    with pytest.raises(UserError) as caught:
        adapt(make(), "triton")
    assert "kernels=auto" in str(caught.value) and "model-x" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"unheard_of": 1}, {"dropout": 0.1}])
def test_what_the_kernel_lacks_is_not_ignored(more):
    c = case(3, [5])
    tree = takeover.TreeMask(pack_words(c.mask), c.length)
    given = {"sliding_window": 4096, "position_ids": c.length, "output_attentions": False, "softcap": None}
    takeover.attention(nn.Module(), c.query, c.key, c.value, None, tree=tree, **given)
    with pytest.raises(NotImplementedError, match=next(iter(more))):
        takeover.attention(nn.Module(), c.query, c.key, c.value, None, tree=tree, **{**given, **more})


def test_a_kernel_that_is_wrong_for_a_model_is_not_used(monkeypatch):
    """The sibling of every node shines through: the check of the model sees it, and the model keeps its own attention."""
    right = hf.pack_words
    monkeypatch.setattr(hf, "pack_words", lambda mask: right(mask | mask.roll(1, -1)))
    assert not adapt(llama()).ours
    monkeypatch.undo()
    assert adapt(llama()).ours
