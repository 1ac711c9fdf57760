"""Export for servers: what is written has their names and keys, and reads back bit for bit."""

import json
import shlex
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from tiny_heads import eagle_head, medusa_heads

from specresearch import export as command
from specresearch.models import exporting, tiny
from specresearch.models.checkpoints import load_head, save_head
from specresearch.models.exporting import for_sglang
from specresearch.overrides import CONF
from specresearch.types import UserError


@pytest.fixture(scope="module")
def deep():
    return tiny.load(dtype="float32", device="cpu", layers=8)


DEFAULT = (2, 4, 5)  # of 8 blocks


@pytest.fixture
def run(tmp_path, deep, monkeypatch, capsys):
    monkeypatch.setattr(command, "make", lambda cfg, group: deep if group == "target" else make(cfg, group))
    make = __import__("specresearch.build", fromlist=["make"]).make

    def export(head, *overrides, training=None):
        save_head(head, tmp_path / "head", training)
        given = [f"ckpt={tmp_path}/head", f"out={tmp_path}/out", "target=tiny", *overrides]
        with initialize_config_dir(CONF, version_base="1.3"):
            lines = command.export(compose("export", given))
        return lines, capsys.readouterr().err

    return export


def config(tmp_path, form):
    return json.loads((tmp_path / "out" / form / "config.json").read_text())


def tensors(tmp_path, form):
    return load_file(tmp_path / "out" / form / "model.safetensors")


def test_eagle3_for_both(tmp_path, run, deep):
    head = eagle_head(dtype=torch.bfloat16, taps=DEFAULT, rope_theta=77.0, context=555)
    lines, _ = run(head, "tree.depth=6", "tree.topk=3", "tree.size=12", training={"tokens": 1})
    flat, stored = config(tmp_path, "sglang"), tensors(tmp_path, "sglang")
    assert flat["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (flat["rope_theta"], flat["rope_parameters"]["rope_theta"], flat["max_position_embeddings"]) == (
        77.0,
        77.0,
        555,
    )
    assert (flat["vocab_size"], flat["draft_vocab_size"], flat["tie_word_embeddings"]) == (257, 100, False)
    assert "eagle_config" not in flat, "the default layers need no ids, which the two servers count differently"
    assert {"midlayer.self_attn.q_proj.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= set(
        stored
    )
    assert "embed_tokens.weight" not in stored
    ids = head.vocabulary.kept
    assert torch.equal(stored["d2t"] + torch.arange(100), ids)
    assert torch.equal(stored["t2d"].nonzero()[:, 0], ids)

    spec, stored = config(tmp_path, "vllm"), tensors(tmp_path, "vllm")
    assert spec["speculators_model_type"] == "eagle3"
    assert spec["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert [spec[k] for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [False] * 4
    assert spec["transformer_layer_config"]["vocab_size"] == 257
    inner = spec["speculators_config"]
    assert inner["default_proposal_method"] == inner["proposal_methods"][0]["proposal_type"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 6
    assert inner["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert "layers.0.hidden_norm.weight" in stored and not any(k.startswith("midlayer") for k in stored)
    embedding = deep.model.get_input_embeddings().weight
    assert torch.equal(stored["embed_tokens.weight"], embedding.to(torch.bfloat16))

    sglang, vllm = (shlex.split(line) for line in lines)
    for flag, value in (("num-steps", "6"), ("eagle-topk", "3"), ("num-draft-tokens", "12"), ("algorithm", "EAGLE3")):
        assert sglang[sglang.index(f"--speculative-{flag}") + 1] == value
    settings = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert settings == {"method": "eagle3", "model": str(tmp_path / "out" / "vllm"), "num_speculative_tokens": 6}


def test_a_tree_for_vllm_becomes_a_chain_and_says_so(run):
    _, said = run(eagle_head(taps=DEFAULT), "format=vllm")
    assert "warning: vLLM drafts no trees" in said
    (line,), said = run(eagle_head(taps=DEFAULT), "format=sglang", "tree=chain", "tree.depth=4")
    assert "warning" not in said
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5" in line
    _, said = run(eagle_head(taps=DEFAULT), "format=sglang", "tree=static")
    assert "SGLang grows a dynamic tree" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"taps": DEFAULT},
        {"taps": (1, 3, 7)},
        {"taps": DEFAULT, "fc_norm": True},
        {"taps": DEFAULT, "norm_output": True},
        {"taps": DEFAULT, "bias": True},
        {"taps": DEFAULT, "draft_vocab_size": 257},
        {"taps": DEFAULT, "from_target": ("embed_tokens.weight", "lm_head.weight")},
        {"taps": DEFAULT, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"version": 1, "bias": True},
        {"version": 1, "bias": False, "head_dim": 4},
    ],
)
def test_sglangs_form_reads_back(tmp_path, run, fields):
    run(eagle_head(dtype=torch.bfloat16, **fields), "format=sglang")  # compares by itself, and would raise
    change = {"norm_output": True} if fields.get("norm_output") else None
    head, _ = load_head(str(tmp_path / "out" / "sglang"), layers=8, config=change)
    assert head.config.taps == fields.get("taps", ("norm",))


@pytest.mark.parametrize(
    "fields",
    [
        {"taps": (1, 3, 7)},
        {"taps": (0, 3, 8)},
        *({"taps": DEFAULT, s: True} for s in ("norm_before_residual", "norm_before_fc", "fc_norm", "qkv_bias")),
        {"version": 1, "bias": False, "head_dim": 4},
    ],
)
def test_vllms_form_reads_back(tmp_path, run, fields):
    run(eagle_head(dtype=torch.bfloat16, **fields), "format=vllm")
    head, _ = load_head(str(tmp_path / "out" / "vllm"), layers=8)
    assert head.config.taps == fields.get("taps", ("norm",))
    assert all(getattr(head.config, key) for key in fields if key.startswith("norm_"))


def test_other_layers_are_counted_as_each_server_counts(tmp_path, run):
    run(eagle_head(taps=(1, 3, 7)))
    ids = config(tmp_path, "sglang")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert (ids, config(tmp_path, "vllm")["eagle_aux_hidden_state_layer_ids"]) == ([0, 2, 6], [1, 3, 7])


def test_a_head_on_the_targets_matrix_takes_its_rows_along(tmp_path, run, deep):
    head = eagle_head(dtype=torch.float32, taps=DEFAULT, from_target=("embed_tokens.weight", "lm_head.weight"))
    run(head)
    rows = deep.head.weight[head.vocabulary.kept]
    for form in ("sglang", "vllm"):
        assert torch.equal(tensors(tmp_path, form)["lm_head.weight"], rows)


def test_eagle1_for_sglang_gets_the_bias_that_is_there_always(tmp_path, run):
    run(eagle_head(version=1, bias=False, head_dim=4), "format=sglang")
    stored = tensors(tmp_path, "sglang")
    assert not stored["fc.bias"].any()
    assert not set(stored) & {"embed_tokens.weight", "lm_head.weight"}
    assert config(tmp_path, "sglang")["architectures"] == ["LlamaForCausalLMEagle"]


@pytest.mark.parametrize("fields", [{}, {"layers": 2}, {"tied": True}, {"tied": True, "draft_vocab_size": 40}])
def test_medusa_for_vllm(tmp_path, run, fields):
    lent = {"from_target": ("lm_head.weight",)} if fields.get("tied") else {}
    heads = medusa_heads(dtype=torch.bfloat16, **fields, **lent)
    if heads.vocabulary.reduced:
        heads.vocabulary.keep(torch.arange(40) * 3)
    (line,), said = run(heads)
    assert "SGLang serves no Medusa heads" in said
    assert json.loads(shlex.split(line)[-1])["num_speculative_tokens"] == 3
    spec, stored = config(tmp_path, "vllm"), tensors(tmp_path, "vllm")
    assert (spec["model_type"], spec["num_heads"], spec["medusa_fc_bias"]) == ("medusa", 3, True)
    assert f"blocks.2.layers.{fields.get('layers', 1) - 1}.bias" in stored
    assert ("token_map" in stored) is heads.vocabulary.reduced


@pytest.mark.parametrize(
    ("fields", "form", "says"),
    [
        ({"norm_before_residual": True}, "sglang", "norm_before_residual"),
        ({"norm_before_fc": True}, "sglang", "norm_before_fc"),
        ({"qkv_bias": True}, "both", "qkv_bias"),
        ({"window": 9}, "vllm", "window"),
        ({"bias": True}, "vllm", "bias"),
        ({"version": 1, "bias": True}, "vllm", "bias"),
        ({"taps": (0, 1, 2)}, "sglang", "embeddings"),
    ],
)
def test_what_a_server_would_ignore_is_refused(tmp_path, run, fields, form, says):
    head = eagle_head(**({"taps": DEFAULT} if fields.get("version") != 1 else {}) | fields)
    if form == "both":
        _, said = run(head)
        assert "warning: not written" in said and says in said
        assert not (tmp_path / "out" / "sglang").exists() and (tmp_path / "out" / "vllm").exists()
    else:
        with pytest.raises(UserError, match=says):
            run(head, f"format={form}")


def test_a_tensor_that_comes_out_wrong_is_noticed(run, monkeypatch):
    def careless(head, blocks):
        config, named = for_sglang(head, blocks)
        return config, named | {"fc.weight": named["fc.weight"] + 1}

    monkeypatch.setattr(command, "for_sglang", careless)
    with pytest.raises(RuntimeError, match="read back"):
        run(eagle_head(taps=DEFAULT), "format=sglang")


def test_a_head_of_nan_is_refused_before_anything_is_written(tmp_path, run):
    head = eagle_head(taps=DEFAULT)
    with torch.no_grad():
        head.fc.weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"NaN or infinite numbers in fc\.weight"):
        run(head)
    assert not (tmp_path / "out").exists()


def test_auto_is_the_shipped_head():
    assert command.chosen("auto", "smollm2").endswith("checkpoints/smollm2/eagle3")


def test_default_taps_are_those_of_the_servers():
    assert exporting.default_taps(32) == (2, 16, 29)


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    save_head(eagle_head(taps=(0, 1, 2)), tmp_path / "head")

    def call(*arguments):
        line = [sys.executable, "-m", "specresearch.export", "target=tiny", *arguments]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)

    done = call(f"ckpt={tmp_path}/head", f"out={tmp_path}/out", "format=vllm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm serve")
    assert "taps 0, 1, 2" in done.stderr
    done = call(f"ckpt={tmp_path}/head", "out=x", "fromat=vllm")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no key fromat: did you mean format")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["format=onnx"], "sglang, vllm or both"),
        (["ckpt=none/at/all"], "no folder"),
        (["config={colour: 1}"], "^.*: config has no colour"),
        (["config=yes"], "config=yes: use a mapping, e.g. 'config="),
        (["ckpt=auto"], "nothing is shipped for target tiny.*ckpt=checkpoints/smollm2/eagle3"),
    ],
)
def test_mistakes(run, overrides, says):
    with pytest.raises(UserError, match=says):
        run(eagle_head(taps=DEFAULT), *overrides)
