"""The head modules against a straight-line computation in float64, variant by variant."""

import pytest
import straight
import torch
from tiny_heads import eagle_head, medusa_heads
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specresearch.models.eagle import EagleConfig, Growing, rotary_frequencies
from specresearch.types import UserError

VARIANTS = {
    "eagle1": {"version": 1},
    "eagle1_no_bias": {"version": 1, "bias": False},
    "eagle1_qkv_bias": {"version": 1, "qkv_bias": True},
    "eagle3": {},
    "full_vocabulary": {"draft_vocab_size": 257},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all_norms": {"norm_output": True, "fc_norm": True, "norm_before_residual": True, "rms_norm_eps": 0.1},
    "another_width": {"target_hidden_size": 10, "from_target": ()},
    "four_taps": {"taps": (0, 1, 2, 4)},
    "theta": {"rope_theta": 50.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "window": {"window": 3},
}


def run(head, tokens, features, path, shift=0):
    """The module over one row at once: known entries, then the path one by one."""
    c, known, cache, answers = head.config, len(features), Growing(), []
    state = head.project(features[None])
    fed, at = torch.tensor([tokens[1:]]), torch.arange(known)
    for token in [None, *path]:
        if token is not None:
            fed, at, state = torch.tensor([[token]]), at[-1:] + 1, state[:, -1:]
        back = at[:, None] - torch.arange(int(at[-1]) + 1)
        mask = (back >= 0) & (back < (c.window or 10**6))
        state = head(fed, state, at[None] + shift, mask[None], cache)
        answers.append(head.logits(state)[0, -1])
    return answers


def inputs(head, length=7):
    c, noise = head.config, torch.Generator().manual_seed(3)
    tokens = torch.randint(c.vocab_size, (length,), generator=noise).tolist()
    width = len(c.taps) * c.target_hidden_size
    return tokens, torch.randn(length - 1, width, generator=noise, dtype=torch.float64), [5, 60, 200, 7]


@pytest.mark.parametrize("name", VARIANTS)
def test_eagle_head_equals_a_straight_line(name):
    head = eagle_head(**VARIANTS[name])
    tokens, features, path = inputs(head)
    expected = straight.eagle(head.state_dict(), head.config, tokens, features, path)
    answers = run(head, tokens, features, path)
    assert len(answers) == len(expected) == 5
    for ours, right in zip(answers, expected):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-10)


SWITCHES = ["eagle1_qkv_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "theta", "linear"]


@pytest.mark.parametrize("name", [*SWITCHES, "window"])
def test_every_switch_changes_the_answer(name):
    """Else the comparison above would say nothing about it."""
    head = eagle_head(**VARIANTS[name])
    tokens, features, path = inputs(head)
    plain = eagle_head(version=head.config.version).config
    other = straight.eagle(head.state_dict(), plain, tokens, features, path)
    assert (run(head, tokens, features, path)[-1] - other[-1]).abs().max() > 1e-3


def test_a_shift_of_all_positions_alone_changes_nothing_and_of_some_does():
    """Rotary positions are relative: this is why a fault shows in the mixture of entries and nodes only."""
    head = eagle_head()
    tokens, features, path = inputs(head)
    plain, moved = (run(head, tokens, features, path, shift) for shift in (0, 9))
    torch.testing.assert_close(plain[-1], moved[-1], rtol=0, atol=1e-9)


def test_llama3_frequencies_equal_transformers():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**sizes, max_position_embeddings=512, rope_parameters=scaling | {"rope_theta": 500.0})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    head = EagleConfig(
        **{"version": 1, "hidden_size": 128, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 64},
        **{"vocab_size": 9, "draft_vocab_size": 9, "target_hidden_size": 128, "taps": ("norm",)},
        rope_theta=500.0,
        rope_scaling=scaling,
    )
    ours = rotary_frequencies(head)
    torch.testing.assert_close(ours.float(), expected.float(), rtol=1e-5, atol=0)
    assert (ours - 500.0 ** -(torch.arange(0, 64, 2).double() / 64)).abs().max() > 1e-3


def test_training_time_test_attends_to_first_keys_and_own_diagonal():
    """Several steps over a whole row at once equal, position by position, the drafting that they imitate."""
    head = eagle_head()
    tokens, features, _ = inputs(head, 9)
    steps, known, cache = 3, len(features), Growing()
    causal, own = torch.ones(known, known).tril().bool(), torch.eye(known).bool()
    state = head.project(features[None])
    ids = torch.tensor([tokens[1:] + [0] * steps])
    for step in range(steps):
        mask = torch.cat([causal, *[own] * step], 1)[None]
        state = head(ids[:, step : step + known], state, torch.arange(known)[None] + step, mask, cache)
        logits = head.logits(state)[0]
        for at in range(known - step):
            context, path = tokens[: at + 2], tokens[at + 2 : at + 2 + step]
            right = straight.eagle(head.state_dict(), head.config, context, features[: at + 1], path)[-1]
            torch.testing.assert_close(logits[at], right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fields", [{}, {"layers": 2}, {"tied": True}, {"layers": 0}, {"draft_vocab_size": 40}])
def test_medusa_heads_equal_a_straight_line(fields):
    heads = medusa_heads(**fields)
    feature = torch.randn(2, 3, 16, dtype=torch.float64)
    answers = heads(feature)
    assert answers.shape == (2, 3, 3, heads.config.draft_vocab_size)
    expected = straight.medusa(heads.state_dict(), 3, heads.config.layers, feature[1, 2])
    torch.testing.assert_close(answers[1, 2], torch.stack(expected), rtol=0, atol=1e-10)


def test_a_new_medusa_head_leaves_the_feature_nearly_alone():
    from specresearch.models.medusa import MedusaConfig, MedusaHeads

    heads = MedusaHeads(MedusaConfig(heads=2, layers=1, hidden_size=8, vocab_size=9, draft_vocab_size=9))
    with torch.no_grad():
        for blocks in heads.blocks:
            blocks[0].linear.bias.zero_()
    x = torch.randn(4, 8)
    torch.testing.assert_close(heads.hidden(x), x[:, None].expand(-1, 2, -1))


def test_draft_vocabulary_spreads_offsets_and_refuses_nonsense():
    vocabulary = eagle_head(draft_vocab_size=3).vocabulary
    vocabulary.keep(torch.tensor([4, 7, 200]))
    assert vocabulary.d2t.tolist() == [4, 6, 198]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [4, 7, 200]
    full = vocabulary.spread(torch.tensor([[1.0, 2.0, 3.0]]), 257)
    assert full[0, [4, 7, 200]].tolist() == [1.0, 2.0, 3.0]
    assert torch.isinf(full).sum() == 254
    for ids in ([7, 4, 200], [4, 4, 9], [4, 7, 257], [-1, 4, 7], [4, 7]):
        with pytest.raises(UserError, match="d2t"):
            vocabulary.keep(torch.tensor(ids))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 2}, "version 1 or 3"),
        ({"version": 1, "taps": (3,)}, "one tap"),
        ({"version": 1, "target_hidden_size": 8}, "as wide as"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"num_kv_heads": 3}, "no such head"),
        ({"from_target": ("norm.weight",)}, "norm.weight"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"draft_vocab_size": 300}, "does not fit"),
    ],
)
def test_impossible_heads_are_refused_by_name(fields, says):
    with pytest.raises(UserError, match=says):
        eagle_head(**fields)
