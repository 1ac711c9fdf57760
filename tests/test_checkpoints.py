"""Published forms of draft heads, each built by hand here: recognised, read strictly, refused by name where they must be."""

import json
import pickle

import pytest
import straight
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import eagle_head, medusa_heads
from torch import nn

from specresearch.models import checkpoints, tiny
from specresearch.models.checkpoints import fit_to, fitted_head, load_head, save_head
from specresearch.models.eagle import EagleConfig, Growing
from specresearch.types import Target, UserError

LAYER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 1, "vocab_size": 257, "rms_norm_eps": 1e-5, "max_position_embeddings": 99},
    **{"hidden_act": "silu", "model_type": "llama"},
}
FLAT = LAYER | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100, "tie_word_embeddings": False}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "architectures": ["Eagle3Speculator"],
    "transformer_layer_config": LAYER | {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}},
    "draft_vocab_size": 100,
    **{"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
}


def named(head, layer="midlayer."):
    """A head's tensors under published names, d2t and t2d beside them, the target's own left out."""
    state = head.state_dict()
    kept = {k.replace("midlayer.", layer): v.clone() for k, v in state.items() if k not in head.config.from_target}
    if kept.pop("vocabulary.d2t", None) is not None:
        ids = head.vocabulary.kept
        kept["d2t"] = ids - torch.arange(len(ids))
        kept["t2d"] = torch.zeros(257, dtype=torch.bool).index_fill(0, ids, True)
    return kept


def put(folder, config, tensors, file="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    path = folder / file
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return str(folder)


def same(head, other):
    names = [n for n in other.state_dict() if n not in other.config.from_target]
    assert head.state_dict().keys() == other.state_dict().keys()
    for name in names:
        assert torch.equal(head.state_dict()[name], other.state_dict()[name]), name


def without(config, *keys, **more):
    return {k: v for k, v in config.items() if k not in keys} | more


EAGLE1 = {"version": 1, "bias": True, "head_dim": 4, "rms_norm_eps": 1e-5}
EAGLE3 = {"head_dim": 4, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle1(tmp_path, file):
    original = eagle_head(**EAGLE1)
    head, described = load_head(put(tmp_path, LAYER, named(original, "layers.0."), file), layers=4)
    same(head, original)
    c = head.config
    assert (c.version, c.taps, c.bias, c.rope_theta, c.context) == (1, ("norm",), True, 10000.0, 99)
    assert c.from_target == ("embed_tokens.weight", "lm_head.weight")
    assert "EAGLE-1" in described.format


def test_eagle1_with_its_own_embeddings_and_switches(tmp_path):
    original = eagle_head(**EAGLE1 | {"bias": False, "qkv_bias": True, "from_target": ("lm_head.weight",)})
    config = LAYER | {"bias": False, "qkv_bias": True, "rope_theta": 500000.0}
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    head, _ = load_head(put(tmp_path, config, named(original, "layers.0.")), layers=4)
    same(head, original)
    assert (head.config.bias, head.config.qkv_bias, head.config.rope_theta) == (False, True, 500000.0)
    assert head.config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_vicuna_config_without_kv_heads(tmp_path):
    original = eagle_head(**EAGLE1 | {"num_kv_heads": 4})
    config = {k: v for k, v in LAYER.items() if k != "num_key_value_heads"}
    same(load_head(put(tmp_path, config, named(original, "layers.0.")), layers=4)[0], original)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_eagle3_flat(tmp_path, layer, file):
    original = eagle_head(**EAGLE3)
    head, described = load_head(put(tmp_path, FLAT, named(original, layer), file), layers=32)
    same(head, original)
    c = head.config
    assert (c.version, c.taps, c.draft_vocab_size, c.rope_theta) == (3, (2, 16, 29), 100, 10000.0)
    assert "2, 16, 29 of 32 blocks" in described.notes[0]


def test_a_head_dim_of_its_own_is_read_off_the_weights(tmp_path):
    original = eagle_head(head_dim=6, rms_norm_eps=1e-5)
    head, _ = load_head(put(tmp_path, FLAT, named(original)), layers=32)
    assert head.config.head_dim == 6


def test_sglang_layer_ids_are_one_less_than_boundaries(tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 14, 27], "use_aux_hidden_state": True}
    original = eagle_head(**EAGLE3)
    head, described = load_head(put(tmp_path, FLAT | {"eagle_config": ids}, named(original)), layers=32)
    assert head.config.taps == (2, 15, 28)
    assert "SGLang" in described.notes[0] and "[1, 14, 27]" in described.notes[0]


def test_speculators_layer_ids_are_boundaries(tmp_path):
    original = eagle_head(**EAGLE3, norm_before_residual=True)
    tensors = named(original, "layers.0.") | {"embed_tokens.weight": torch.randn(257, 16)}
    head, described = load_head(put(tmp_path, SPECULATORS, tensors), layers=32)
    c = head.config
    assert (c.taps, c.norm_before_residual, c.rope_theta, c.from_target) == ((1, 2, 4), True, 77.0, ())
    assert "speculators" in described.format
    without = {k: v for k, v in SPECULATORS.items() if k != "eagle_aux_hidden_state_layer_ids"}
    head, _ = load_head(put(tmp_path, without, tensors), layers=32)
    assert head.config.taps == (2, 16, 29)


@pytest.mark.parametrize("switch", ["norm_before_fc", "fc_norm", "norm_output"])
def test_speculators_variants(tmp_path, switch):
    original = eagle_head(**EAGLE3, norm_before_residual=True, **{switch: True})
    head, _ = load_head(put(tmp_path, SPECULATORS | {switch: True}, named(original, "layers.0.")), layers=32)
    assert getattr(head.config, switch)
    same(head, original)


def test_flat_variants(tmp_path):
    original = eagle_head(**EAGLE3, fc_norm=True, target_hidden_size=10, taps=(1, 2, 3), from_target=())
    config = FLAT | {"use_aux_norm": True, "target_hidden_size": 10}
    head, _ = load_head(put(tmp_path, config, named(original)), layers=32)
    assert head.config.fc_norm and head.config.target_hidden_size == 10
    same(head, original)


def test_a_whole_draft_vocabulary(tmp_path):
    """No d2t, or one of zeros; without an lm_head of its own it is the target's."""
    original = eagle_head(**EAGLE3, draft_vocab_size=257)
    plain = named(original)
    zeros = plain | {"d2t": torch.zeros(257, dtype=torch.long), "t2d": torch.ones(257, dtype=torch.bool)}
    bare = {k: v for k, v in plain.items() if k != "lm_head.weight"}
    for at, tensors in enumerate((plain, zeros, bare)):
        config = FLAT | {"draft_vocab_size": 257 if at < 2 else None}
        head, _ = load_head(put(tmp_path / str(at), config, tensors), layers=32)
        assert head.config.draft_vocab_size == 257
        assert ("lm_head.weight" in head.config.from_target) is (at == 2)


def test_sharded_weights(tmp_path):
    original = eagle_head(**EAGLE3)
    tensors = list(named(original).items())
    save_file(dict(tensors[:5]), tmp_path / "model-1.safetensors")
    save_file(dict(tensors[5:]), tmp_path / "model-2.safetensors")
    where = {k: f"model-{1 if i < 5 else 2}.safetensors" for i, (k, _) in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    same(load_head(str(tmp_path), layers=32)[0], original)


# -- Medusa --------------------------------------------------------------------------------------------------------------


def legacy(heads, own=True):
    state, layers = heads.state_dict(), heads.config.layers
    named = {k.removeprefix("blocks."): v for k, v in state.items() if k.startswith("blocks.")}
    if own:
        named |= {f"{k.split('.')[1]}.{layers}.weight": v for k, v in state.items() if k.startswith("lm_heads.")}
    return named


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_with_own_matrices(tmp_path, file, layers):
    original = medusa_heads(heads=5, layers=layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    head, described = load_head(put(tmp_path, config, legacy(original), file), layers=4)
    same(head, original)
    assert (head.config.heads, head.config.layers, head.config.vocab_size) == (5, layers, 257)
    assert "5 heads in the weights" in described.notes[0] and "says 2" in described.notes[0]


def test_medusa_without_config(tmp_path):
    original = medusa_heads()
    same(load_head(put(tmp_path, None, legacy(original), "medusa_lm_head.pt"), layers=4)[0], original)


def test_medusa_that_uses_the_targets_matrix(tmp_path, target):
    original = medusa_heads(tied=True, from_target=("lm_head.weight",))
    where = put(tmp_path, {"medusa_num_heads": 3, "version": "2"}, legacy(original), "medusa_lm_head.safetensors")
    with pytest.raises(UserError, match="vocab_size"):
        load_head(where, layers=2)
    head, _ = load_head(where, layers=2, config={"vocab_size": 257})
    assert head.config.tied and head.config.from_target == ("lm_head.weight",)
    fit_to(head, target)
    assert head.lm_head.weight.data_ptr() == target.head.weight.data_ptr()


def vllm_form(heads):
    named = {}
    for key, value in heads.state_dict().items():
        parts = key.split(".")
        if key.startswith("blocks."):
            named[f"medusa_heads.blocks.{parts[1]}.layers.{parts[2]}.{parts[4]}"] = value
        elif key.startswith("lm_heads."):
            named[key] = value
    return named


def test_medusa_in_vllms_form(tmp_path):
    original = medusa_heads(layers=2)
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True, "vocab_size": 257}
    same(load_head(put(tmp_path, config, vllm_form(original)), layers=4)[0], original)


def test_medusa_in_vllms_form_truncated_and_shared(tmp_path):
    original = medusa_heads(tied=True, draft_vocab_size=5)
    original.vocabulary.keep(torch.tensor([3, 8, 9, 100, 256]))
    named = vllm_form(original) | {"lm_heads.0.weight": original.lm_head.weight.data}
    named["token_map"] = torch.tensor([3, 8, 9, 100, 256])
    config = {"model_type": "medusa", "original_lm_head": True, "truncated_vocab_size": 5, "vocab_size": 257}
    head, _ = load_head(put(tmp_path, config, named), layers=4)
    same(head, original)
    assert (head.config.draft_vocab_size, head.config.vocab_size, head.config.tied) == (5, 257, True)


# -- our own form --------------------------------------------------------------------------------------------------------

OWN = [{}, {"version": 1}, {"norm_output": True, "window": 9}, {"rope_scaling": {"type": "linear", "factor": 2.0}}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", OWN)
def test_own_form_comes_back_bit_for_bit(tmp_path, fields, dtype):
    original = eagle_head(dtype=dtype, **fields)
    save_head(original, tmp_path, {"tokens": 5})
    head, described = load_head(str(tmp_path), layers=4)
    same(head, original)
    assert head.config == original.config
    assert described.format == "specresearch"
    stored = load_file(tmp_path / "model.safetensors")
    assert not set(stored) & {"embed_tokens.weight", "t2d"}
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {"tokens": 5}


def test_own_form_of_medusa(tmp_path):
    original = medusa_heads(tied=True, draft_vocab_size=40, from_target=("lm_head.weight",))
    save_head(original, tmp_path)
    head, _ = load_head(str(tmp_path), layers=4)
    assert head.config == original.config
    same(head, original)


def test_a_reduced_matrix_of_the_target_is_its_rows(tmp_path, target):
    original = eagle_head(taps=(0, 1, 2), from_target=("embed_tokens.weight", "lm_head.weight"))
    save_head(original, tmp_path)
    head = fitted_head("eagle", target, str(tmp_path))
    assert torch.equal(head.lm_head.weight, target.head.weight[original.vocabulary.kept])
    assert head.embed_tokens.weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert head.fc.weight.dtype == target.dtype
    assert fitted_head("eagle", target, str(tmp_path), dtype="float32").fc.weight.dtype == torch.float32


def test_loaded_forms_compute_what_they_should(tmp_path, target):
    """From a file in a published form to logits, against the straight line on the same file's tensors."""
    original = eagle_head(**EAGLE3, norm_before_residual=True, taps=(1, 2, 4))
    tensors = named(original, "layers.0.")
    deep = tiny.load(dtype="float64", device="cpu", layers=4)
    head = fitted_head("eagle", deep, put(tmp_path, SPECULATORS, tensors))
    tokens, features = [5, 9, 77, 200], torch.randn(3, 48, dtype=torch.float64)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None]
    state = head(torch.tensor([tokens[1:]]), head.project(features[None]), torch.arange(3)[None], causal, Growing())
    weights = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}
    weights["embed_tokens.weight"] = deep.model.get_input_embeddings().weight.data
    config = EagleConfig(**{**original.config.__dict__, "rope_theta": 77.0})
    expected = straight.eagle(weights, config, tokens, features, [])[-1]
    torch.testing.assert_close(head.logits(state)[0, -1], expected, rtol=0, atol=1e-10)


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_all_faulty_tensors_are_listed_at_once(tmp_path):
    tensors = named(eagle_head(**EAGLE3))
    del tensors["norm.weight"], tensors["midlayer.mlp.up_proj.weight"]
    tensors |= {"fc2.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(99, 16)}
    with pytest.raises(UserError) as error:
        load_head(put(tmp_path, FLAT, tensors), layers=32)
    for part in ("missing midlayer.mlp.up_proj.weight [24, 16]", "missing norm.weight [16]", "unexpected fc2.weight"):
        assert part in str(error.value)
    assert "lm_head.weight is [99, 16] instead of [100, 16]" in str(error.value)
    assert "\n" not in str(error.value)


def twice(tensors):
    return tensors | {k.replace("midlayer.", "layers.1."): v.clone() for k, v in tensors.items() if "mlp" in k}


def swapped(tensors):
    return tensors | {"d2t": tensors["d2t"] + torch.arange(100)}  # ids where offsets belong


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (without(FLAT, "hidden_size"), None, "lacks hidden_size"),
        (without(FLAT, hidden_act="gelu"), None, "hidden_act=gelu"),
        (without(FLAT, rope_scaling={"type": "dynamic", "factor": 2.0}), None, "dynamic"),
        (without(FLAT, rope_scaling={"rope_type": "yarn", "factor": 2.0}), None, "yarn"),
        (without(FLAT, rope_theta=1.0, rope_parameters={"rope_theta": 2.0}), None, "rope_parameters"),
        (without(FLAT, norm_output=True), None, "norm_output=true means two things"),
        (without(FLAT, eagle_aux_hidden_state_layer_ids=[1, 2, 3]), None, "taps"),
        (without(FLAT, eagle_config={"use_aux_hidden_state": False}), None, "use_aux_hidden_state"),
        (without(FLAT, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 31]}), None, "4 taps"),
        (FLAT, twice, "several layers"),
        (FLAT, lambda t: t | {"midlayer.self_attn.q_norm.weight": torch.ones(4)}, "q_norm"),
        (FLAT, swapped, "d2t"),
        (FLAT, lambda t: t | {"t2d": ~t["t2d"]}, "contradict"),
        (without(FLAT, tie_word_embeddings=True), lambda t: without(t, "lm_head.weight"), "tie_word_embeddings"),
        (FLAT, lambda t: {"model.layers.0.mlp.up_proj.weight": t["fc.weight"]}, "whole model"),
        (FLAT, lambda t: {"something": t["fc.weight"]}, "something"),
        ({}, lambda t: {}, "no form of draft head"),
        (without(SPECULATORS, speculators_model_type="dflash"), None, "dflash"),
        (without(SPECULATORS, "transformer_layer_config"), None, "transformer_layer_config"),
        (without(SPECULATORS, "norm_before_residual"), None, "norm_before_residual"),
        ({"format": "specresearch", "kind": "hydra"}, None, "hydra"),
        ({"format": "specresearch", "kind": "eagle", "colour": 1}, None, "colour"),
        ({"format": "specresearch", "kind": "eagle"}, None, "not complete"),
    ],
)
def test_refusals_by_name(tmp_path, config, change, says):
    tensors = named(eagle_head(**EAGLE3))
    with pytest.raises(UserError, match=says) as error:
        load_head(put(tmp_path, config, change(tensors) if change else tensors), layers=32)
    assert str(error.value).startswith(str(tmp_path))


def edited(name, edit):
    return lambda tensors: tensors | {name: edit(tensors[name].clone())}


FIELDS = [
    *(("hidden_size", "16"), ("hidden_size", 0), ("num_attention_heads", 0), ("num_attention_heads", [4])),
    *(("vocab_size", None), ("vocab_size", -1), ("intermediate_size", 24.5), ("num_key_value_heads", 0)),
    *(("rms_norm_eps", -1), ("rms_norm_eps", None), ("rms_norm_eps", "x"), ("rope_theta", 0), ("rope_theta", -5)),
    *(("rope_theta", float("nan")), ("max_position_embeddings", None), ("sliding_window", -3), ("layer_types", 5)),
    *(("draft_vocab_size", "x"), ("eagle_config", "yes"), ("rope_scaling", "linear"), ("rope_parameters", [1])),
    *(("norm_before_residual", "no"), ("fc_norm", 1)),
]
DAMAGED = [
    *((without(FLAT, **{key: value}), None, key) for key, value in FIELDS),
    (without(FLAT, rope_scaling={"rope_type": "linear", "factor": 0}), None, "factor=0"),
    (without(FLAT, rope_scaling={"rope_type": "linear", "factor": "x"}), None, "factor='x'"),
    (without(FLAT, eagle_config={"eagle_aux_hidden_state_layer_ids": "abc"}), None, "eagle_aux_hidden_state_layer_ids"),
    (without(SPECULATORS, eagle_aux_hidden_state_layer_ids=[1, None, 4]), None, "eagle_aux_hidden_state_layer_ids"),
    (FLAT, edited("d2t", lambda t: t + 0.4), "d2t holds float32, and whole numbers"),
    (FLAT, edited("fc.weight", lambda t: t * torch.nan), "NaN or infinite numbers in fc.weight"),
    (FLAT, edited("lm_head.weight", lambda t: t.index_fill(0, torch.tensor([7]), torch.inf)), "in lm_head.weight"),
    (FLAT, edited("lm_head.weight", lambda t: t.long()), "lm_head.weight holds int64, and fractions"),
    (FLAT, edited("fc.weight", lambda t: t[0]), r"fc.weight \[48\] is no matrix"),
    (FLAT, edited("norm.weight", lambda t: t[0]), r"norm.weight \[\] is no vector"),
    (FLAT, edited("midlayer.self_attn.q_proj.weight", lambda t: t[:2]), "head_dim=0"),
]


@pytest.mark.parametrize(("config", "change", "says"), DAMAGED)
def test_damaged_heads_are_refused_with_folder_and_field(tmp_path, config, change, says):
    tensors = named(eagle_head(**EAGLE3))
    with pytest.raises(UserError, match=says) as error:
        load_head(put(tmp_path, config, change(tensors) if change else tensors), layers=32)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)
    assert "are damaged (" not in str(error.value), "by the net below, without the field's name"


OWN_FIELDS = [
    ("rope_theta", 0),
    ("window", -3),
    ("rms_norm_eps", -1),
    ("hidden_size", None),
    ("taps", 5),
    ("bias", "x"),
]


@pytest.mark.parametrize(
    ("key", "value"), [*OWN_FIELDS, ("rope_scaling", "linear"), ("from_target", 3), ("head_dim", 1e9)]
)
def test_damaged_heads_of_our_own_form(tmp_path, key, value):
    save_head(eagle_head(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"^{tmp_path}: {key}="):
        load_head(str(tmp_path), layers=4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {k: v * torch.nan for k, v in t.items()}, "NaN or infinite numbers in 0.0.linear.bias"),
        (
            lambda t: t | {"900000000.1.weight": t["2.1.weight"].clone()},
            "heads in the weights are numbered 0, 1, 2, 900000000",
        ),
        (lambda t: {k: v for k, v in t.items() if not k.startswith("1.")}, "heads in the weights are numbered 0, 2:"),
        (
            lambda t: {k.replace(".0.linear", ".7.linear"): v for k, v in t.items()},
            "blocks in the weights are numbered 7",
        ),
        (edited("0.1.weight", lambda t: t.long()), "lm_heads.0.weight holds int64"),
        (edited("0.0.linear.weight", lambda t: t[0]), r"0.0.linear.weight \[16\] is no matrix"),
    ],
)
def test_damaged_medusa_heads(tmp_path, change, says):
    where = put(tmp_path, {"medusa_num_heads": 3}, change(legacy(medusa_heads())), "medusa_lm_head.safetensors")
    with pytest.raises(UserError, match=says) as error:
        load_head(where, layers=4)
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(("key", "value"), [("heads", 900000000), ("heads", "3"), ("layers", -1), ("vocab_size", 0)])
def test_damaged_medusa_heads_of_our_own_form(tmp_path, key, value):
    save_head(medusa_heads(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"{key}="):
        load_head(str(tmp_path), layers=4)


@pytest.mark.parametrize("ids", [[3, 8, 9, 100, 900], [-1, 8, 9, 100, 256], [0.5, 1, 2, 3, 4]])
def test_a_token_map_outside_of_the_vocabulary(tmp_path, ids):
    original = medusa_heads(tied=True)
    named = vllm_form(original) | {"lm_heads.0.weight": original.lm_head.weight.data, "token_map": torch.tensor(ids)}
    config = {"model_type": "medusa", "original_lm_head": True, "truncated_vocab_size": 5, "vocab_size": 257}
    with pytest.raises(UserError, match="token_map does not list ids"):
        load_head(put(tmp_path, config, named), layers=4)


@pytest.mark.parametrize(
    ("damage", "config", "says"),
    [
        (lambda t: t * torch.nan, {}, "NaN or infinite numbers in model"),
        (lambda t: t[0], {}, "instead of"),
        (None, {"draft_vocab_size": "3"}, "draft_vocab_size='3'"),
        (None, {"layers": [9]}, "tiny has the layers 0 to 1"),
        (None, {"layers": None}, "layers"),
    ],
)
def test_damaged_small_lms(tmp_path, target, damage, config, says):
    from specresearch.models.distilled import load_student, save_student, student

    save_student(student(target, [1], torch.tensor([0, 5, 256])), tmp_path, [1], {})
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(own | config))
    if damage:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"] = damage(tensors["model.layers.0.mlp.up_proj.weight"]).contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=says) as error:
        load_student(str(tmp_path), target)
    assert f"in {tmp_path} cannot be read" in str(error.value)


def test_a_small_lm_is_no_head_and_says_what_it_is_for(tmp_path, target):
    from specresearch.models.distilled import save_student, student

    save_student(student(target, [1], torch.tensor([0, 5, 256])), tmp_path, [1], {})
    with pytest.raises(UserError, match=r"distilled small LM.*drafter=small_lm"):
        load_head(str(tmp_path), layers=2)


@pytest.mark.parametrize(
    ("config", "change", "taps"),
    [
        (without(FLAT, norm_output=True), {"norm_output": False}, (2, 16, 29)),
        (without(FLAT, eagle_aux_hidden_state_layer_ids=[1, 2, 3]), {"taps": [1, 2, 3]}, (1, 2, 3)),
        (without(FLAT, rope_theta=1.0, rope_parameters={"rope_theta": 2.0}), {"rope_theta": 2.0}, (2, 16, 29)),
        (without(SPECULATORS, "norm_before_residual"), {"norm_before_residual": True}, (1, 2, 4)),
    ],
)
def test_what_a_config_leaves_open_can_be_said(tmp_path, config, change, taps):
    head, _ = load_head(put(tmp_path, config, named(eagle_head(**EAGLE3))), layers=32, config=change)
    assert head.config.taps == taps
    assert not head.config.norm_output
    with pytest.raises(UserError, match=r"no colour.*there are version"):
        load_head(str(tmp_path), layers=32, config=change | {"colour": 1})


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a checkpoint was run')",)


def test_nothing_is_unpickled_but_tensors(tmp_path):
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Bomb()}))
    with pytest.raises(UserError, match="more than tensors"):
        load_head(str(tmp_path), layers=4)
    torch.save({"0.0.linear.weight": nn.Linear(2, 2)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="more than tensors"):
        load_head(str(tmp_path), layers=4)
    torch.save({"model": {"0.0.linear.weight": torch.zeros(2, 2)}}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="no state dict"):
        load_head(str(tmp_path), layers=4)


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(UserError, match="no weights there"):
        load_head(str(tmp_path), layers=4)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        load_head(str(tmp_path), layers=4)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        load_head(str(tmp_path), layers=4)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="no mapping"):
        load_head(str(tmp_path), layers=4)
    with pytest.raises(UserError, match="no folder with a draft head"):
        load_head(str(tmp_path / "nowhere"), layers=4)


@pytest.mark.parametrize("index", ["{", "{}", "[1]", '{"weight_map": {"a": "../other.safetensors"}}'])
def test_a_broken_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="names no files"):
        load_head(str(tmp_path), layers=4)


def test_a_missing_shard(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UserError, match="cannot be read"):
        load_head(str(tmp_path), layers=4)


def test_a_vocabulary_matrix_with_a_bias_is_refused(tmp_path, target):
    save_head(eagle_head(version=1), tmp_path)
    target.head.bias = nn.Parameter(torch.zeros(257))
    try:
        with pytest.raises(UserError, match="bias"):
            fitted_head("eagle", target, str(tmp_path))
    finally:
        target.head.bias = None


def test_other_targets_than_hugging_faces_are_refused():
    for kind in ("eagle", "medusa"):
        with pytest.raises(UserError, match=f"drafter={kind} needs a Hugging Face target"):
            fitted_head(kind, Target(), "auto")


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    import huggingface_hub

    def snapshot(where, revision, allow_patterns):
        assert not any(p.endswith(".py") or p == "*" for p in allow_patterns), "code would be fetched"
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UserError, match="not to be had from the Hub: no network"):
        load_head("someone/head", layers=4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 300}, "vocabulary of 300"),
        ({"target_hidden_size": 10, "from_target": ()}, "width 10"),
        ({"taps": (1, 2, 3)}, "after block 3"),
    ],
)
def test_heads_of_other_targets_are_refused(tmp_path, target, fields, says):
    save_head(eagle_head(**({"taps": (0, 1, 2)} | fields)), tmp_path)
    with pytest.raises(UserError, match=says):
        fitted_head("eagle", target, str(tmp_path))


def test_auto_names_what_to_do_where_nothing_is_shipped(target):
    for kind in ("eagle", "medusa"):
        with pytest.raises(UserError) as error:
            fitted_head(kind, target, "auto")
        assert "drafter=ngram" in str(error.value)
        assert f"python -m specresearch.train drafter={kind}" in str(error.value)


def test_auto_finds_the_shipped_head(tmp_path, target, monkeypatch):
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "specresearch" / "models" / "checkpoints.py"))
    save_head(eagle_head(taps=(0, 1, 2)), tmp_path / "specresearch" / "checkpoints" / "tiny" / "eagle3")
    assert fitted_head("eagle", target, "auto").config.taps == (0, 1, 2)


def test_the_small_lm_finds_the_shipped_student(tmp_path, target, monkeypatch):
    from specresearch.drafters.small_lm import SmallLM
    from specresearch.models.distilled import save_student, student

    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "specresearch" / "models" / "checkpoints.py"))
    kept = torch.tensor([0, 5, 256])
    own = student(target, [1], kept)
    with torch.no_grad():
        own.model.layers[0].mlp.up_proj.weight.fill_(0.25)
    save_student(own, tmp_path / "specresearch" / "checkpoints" / "tiny" / "small_lm", [1], {})
    found = SmallLM(target).model
    assert len(found.blocks) == 1
    assert bool((found.blocks[0].mlp.up_proj.weight == 0.25).all())
    assert torch.equal(found.head.weight, target.head.weight[kept])
    assert torch.equal(found.model.vocabulary.kept, kept)


@pytest.mark.parametrize(("ckpt", "config", "says"), [(None, None, "ckpt"), ("x", [1], "mapping")])
def test_nonsense_settings(target, ckpt, config, says):
    with pytest.raises(UserError, match=says):
        fitted_head("eagle", target, ckpt, config=config)


def test_the_wrong_drafter_is_named(tmp_path, target):
    from specresearch.drafters.eagle import Eagle
    from specresearch.drafters.medusa import Medusa

    save_head(eagle_head(taps=(0, 1, 2)), tmp_path / "eagle")
    save_head(medusa_heads(), tmp_path / "medusa")
    with pytest.raises(UserError, match="drafter=medusa"):
        Eagle(target, ckpt=str(tmp_path / "medusa"))
    with pytest.raises(UserError, match="drafter=eagle"):
        Medusa(target, ckpt=str(tmp_path / "eagle"))
