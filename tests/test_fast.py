"""The forward of the Llama family gives what transformers' own gives, and is given up where it does not."""

import pytest
import torch
from test_attention import passes
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specresearch.models import fast, tiny
from specresearch.models.hf import HFModel
from specresearch.types import UserError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 257, "eos_token_id": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": False}
FAMILY = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


def build(kind, **options):
    torch.manual_seed(0)
    model, config, more = FAMILY[kind]
    made = model(config(**SIZES, **HEADS, **more, **options))
    for name, parameter in made.named_parameters():  # transformers leaves biases at 0 and norms at 1
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return made


def adapt(model, how="auto"):
    return HFModel(model, tiny.byte_tokenizer(), "model-x", how)


@torch.inference_mode()
def stream(model, taps):
    tokens = torch.arange(12).view(2, 6) * 7
    model.reserve(2, 6, 1)
    return model.extend([0, 1], tokens, torch.tensor([6, 4]), taps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILY)
def test_equal_to_the_general_path(kind, dtype):
    quick, general = (adapt(build(kind).to(dtype), how) for how in ("auto", "off"))
    assert quick.fast is not None and general.fast is None
    bound = 64 * max(torch.finfo(dtype).eps, 1e-7)
    if dtype != torch.bfloat16:  # `passes` compares two orders of summation to float32's accuracy
        for ours, theirs in zip(passes(quick), passes(general)):
            assert (ours - theirs).abs().max() < bound * theirs.abs().max()
    for taps in [(0, 1, 3, "norm"), ("norm",)]:
        for ours, theirs in zip(stream(quick, taps), stream(general, taps)):
            ours, theirs = ours[:1], theirs[:1]  # row 1 has pads
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < bound * theirs.abs().max()


def test_weights_may_change():
    model = build("qwen2")
    quick = adapt(model)
    first = passes(quick)[1]
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    changed = passes(quick)[1]
    assert (changed - first).abs().max() > 1e-3
    assert (changed - passes(adapt(model, "off"))[1]).abs().max() < 1e-4


def test_where_it_differs_the_model_keeps_its_own(monkeypatch):
    laid_out = fast.Block.of

    def wrong(*given):
        block = laid_out(*given)
        block.scale *= 1.5
        return block

    monkeypatch.setattr(fast.Block, "of", wrong)
    quick = adapt(build("llama"))
    assert quick.fast is None
    passes(quick)


def test_without_torchscript_the_same_functions_run(monkeypatch):
    quick = adapt(build("qwen3"))
    scripted = passes(quick)

    def gone(*_):
        raise RuntimeError("torch.jit is no more")

    monkeypatch.setattr(torch.jit, "script", gone)
    plain = adapt(build("qwen3"))
    for ours, theirs in zip(passes(plain), scripted):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert isinstance(quick.fast.script, torch.jit.ScriptModule) and type(plain.fast.script) is fast.Stack


def test_others_are_left_alone():
    class Mine(LlamaForCausalLM):
        pass

    assert adapt(build("llama", attn_implementation="eager")).fast is None
    assert adapt(build("llama", hidden_act="gelu")).fast is None
    assert adapt(Mine(LlamaConfig(**SIZES, **HEADS))).fast is None
    with pytest.raises(UserError, match="auto or off"):
        adapt(build("llama"), "on")


def test_the_first_layers_go_the_same_way():
    for how in ("auto", "off"):
        whole = adapt(build("qwen3"), how)
        early = whole.first_layers(2)
        assert (early.fast is None) == (how == "off")
        passes(early)
