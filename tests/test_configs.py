"""Every option in conf/ composes and instantiates; new parts come in from outside with one file and one yaml."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_heads import eagle_head, medusa_heads

from specresearch.build import build, engine, make
from specresearch.fit import check_fit
from specresearch.models.checkpoints import save_head
from specresearch.overrides import CONF
from specresearch.trees.best_first import BestFirstTree
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Drafter, UserError, Verifier
from specresearch.verifiers.block import Block
from specresearch.verifiers.greedy import Greedy
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.spectr import SpecTr
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal

ROOT = Path(__file__).parents[1]
NEEDED = {
    ("drafter", "small_lm"): ["drafter.layers=1"],
    ("verifier", "typical"): ["lossy=allow"],
    ("verifier", "block"): ["temperature=1", "tree=chain"],
    ("verifier", "traversal"): ["temperature=1", "tree=static", "tree.draw=without_replacement"],
    ("verifier", "spectr"): ["temperature=1", "tree=static", "tree.draw=iid"],
    ("tree", "optimal"): ["tree.acceptance=[[0.6,0.2],[0.5]]"],
    ("prompts", "text"): ["prompts.text=hello"],
    ("grammar", "json_schema"): ['grammar.schema=\'{"type": "object"}\''],
    ("grammar", "regex"): ["grammar.pattern='[a-z]+'"],
    ("grammar", "ebnf"): ["grammar.rules='root ::= \"a\"'"],
    ("prompts", "file"): [f"prompts.path={ROOT}/specresearch/prompts/builtin.jsonl"],
}
OPTIONS = [(path.parent.name, path.stem) for path in sorted(Path(CONF).glob("*/*.yaml"))]
OPTIONS = [
    (group, name) for group, name in OPTIONS if not name.startswith("tuned-")
]  # by specresearch.tune, of this machine
ABROAD = {
    ("target", "random"),
    ("target", "hf"),
    ("target", "smollm2"),
    ("experiment", "spec_bench"),
}  # need a download, or gigabytes
ABROAD |= {("prompts", name) for name in ("hf", "spec_bench", "humaneval", "gsm8k", "mt_bench")}  # see test_prompts.py


def configuration(*overrides: str):
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("config", ["target=tiny", "drafter=ngram", "tracker=none", *overrides])


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A draft head for the tiny target, as `drafter.ckpt` takes it, by drafter."""
    folder = tmp_path_factory.mktemp("heads")
    save_head(eagle_head(taps=(0, 1, 2)), folder / "eagle")
    save_head(medusa_heads(), folder / "medusa")
    return {name: [f"drafter.ckpt={folder}/{name}"] for name in ("eagle", "medusa")}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_instantiates(group, option, heads):
    if (group, option) == ("experiment", "tune"):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    needed = heads.get(option, []) if group == "drafter" else []
    cfg = configuration(f"{group}={option}", *NEEDED.get((group, option), needed))
    if (group, option) not in ABROAD:
        parts = build(cfg)
        assert parts.policy.size >= 1
        assert make(cfg, "prompts")
        make(cfg, "tracker")


def test_all_groups_are_covered():
    assert {"drafter", "tree", "verifier", "target", "prompts", "kernels", "tracker", "grammar", "experiment"} == {
        group for group, _ in OPTIONS
    }


def test_root_keys_and_defaults():
    cfg = OmegaConf.to_container(configuration())
    expected = {"seed": 0, "max_new_tokens": 128, "batch_size": 1, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}
    expected |= {"repetition_penalty": 1, "logit_bias": {}, "stop": [], "limit": None, "baseline": True, "check": True}
    expected |= {"lossy": "refuse", "resume": None, "profile": False, "objective": None}
    assert expected.items() <= cfg.items()


def test_experiment_changes_only_what_it_says():
    cfg = configuration("experiment=ngram", "seed=7", "tree=chain")
    assert (cfg.limit, cfg.baseline, cfg.seed, cfg.max_new_tokens) == (14, "hf", 7, 64)
    assert cfg.tree._target_.endswith("Chain")


def test_every_experiment_has_its_script():
    presets = {name for group, name in OPTIONS if group == "experiment"}
    assert presets <= {path.stem for path in (ROOT / "experiments").glob("*.py")}


class Fussy(Verifier):
    laws = frozenset({"without_replacement"})
    growths = frozenset({"static"})


class ChainOnly(Verifier):
    chain_only = True


STATIC = StaticTree(temperature=1, widths=[2, 2])
SAMPLED_CHAIN = Chain(depth=2, temperature=1)


@pytest.mark.parametrize(
    ("verifier", "policy", "temperature", "fits"),
    [
        (Rejection(), STATIC, 1.0, True),
        (Rejection(), SAMPLED_CHAIN, 1.0, True),
        (Rejection(), DynamicTree(depth=2, topk=2, size=4, temperature=1, draw="iid"), 1.0, True),
        (Rejection(), BestFirstTree(depth=2, topk=2, size=4, temperature=1, draw="iid"), 1.0, True),
        (TargetOnly(), STATIC, 1.0, True),
        (TargetOnly(threshold_acc=0.9), STATIC, 1.0, False),
        (Greedy(), STATIC, 1.0, False),
        (Greedy(), STATIC, 0.0, True),
        (Fussy(), STATIC, 1.0, False),
        (Fussy(), SAMPLED_CHAIN, 1.0, True),  # on a chain, draws with and without replacement are one
        (Fussy(), BestFirstTree(depth=2, topk=2, size=4, temperature=1, draw="without_replacement"), 1.0, False),
        (ChainOnly(), STATIC, 1.0, False),
        (ChainOnly(), SAMPLED_CHAIN, 1.0, True),
        (Block(), SAMPLED_CHAIN, 1.0, True),
        (Block(), Chain(depth=2, temperature=1, draw="topk"), 1.0, False),
        (Traversal(), SAMPLED_CHAIN, 1.0, True),
        (Traversal(), StaticTree(temperature=1, widths=[2], draw="iid"), 1.0, False),
        (SpecTr(), BestFirstTree(depth=2, topk=2, size=4, temperature=1, draw="iid"), 1.0, False),
        (SpecTr(), StaticTree(temperature=1, widths=[2], draw="iid"), 1.0, True),
        (SampleAndMatch(), DynamicTree(depth=2, topk=2, size=4, temperature=1), 1.0, True),
    ],
)
def test_misfits_are_refused_with_the_name_of_one_that_fits(verifier, policy, temperature, fits):
    if fits:
        check_fit(Drafter(), policy, verifier, temperature, "refuse")
    else:
        with pytest.raises(UserError, match="verifier=rejection"):
            check_fit(Drafter(), policy, verifier, temperature, "refuse")


@pytest.mark.parametrize(
    ("verifier", "advice"),
    [
        (Block(), "tree=chain tree.draw=iid"),
        (Traversal(), "tree.draw=without_replacement"),
        (SpecTr(), "tree.draw=iid"),
    ],
)
def test_the_refusal_names_the_draw_that_the_rule_needs(verifier, advice):
    policy = Chain(depth=2, temperature=1, draw="topk")
    with pytest.raises(UserError, match=advice):
        check_fit(Drafter(), policy, verifier, 1.0, "refuse")


def test_lossy_rules_run_when_allowed():
    check_fit(Drafter(), STATIC, TargetOnly(threshold_acc=0.9), 1.0, "allow")


def test_a_tree_that_is_reranked_carries_no_q():
    policy = DynamicTree(depth=2, topk=2, size=4, temperature=1, draw="without_replacement")
    assert (policy.law, policy.growth) == ("point", "pruned_after_reveal")


# -- parts from outside the checkout ------------------------------------------------------------------------------------

PARTS = '''
import torch
from specresearch.trees.static import StaticTree
from specresearch.kernels.verify import walk
from specresearch.types import Drafter, Verifier


class Bigram(Drafter):
    """Proposes the token whose id is one higher."""

    def __init__(self, target, *, step):
        self.vocab_size, self.step = target.vocab_size, step

    def expand(self, frontier):
        following = (frontier.tokens + self.step) % self.vocab_size
        return torch.nn.functional.one_hot(following, self.vocab_size).float() * 5


class Fork(StaticTree):
    def __init__(self, *, ways, temperature):
        super().__init__(temperature=temperature, widths=[ways, 1])


class FirstChild(Verifier):
    """Takes nothing: always right, never fast."""

    def verify(self, tree, p, rng):
        self.p = p
        return walk(tree, self, rng)

    def enter(self, node, moving):
        self.law = self.p(node)

    def accept(self, child, token, trying, rng):
        return torch.zeros_like(trying)

    def finish(self, rng):
        return rng.pick(self.law)
'''


@pytest.fixture
def outside(tmp_path):
    """A folder of a user's own, with a drafter, a tree policy and a verifier, each one class and one yaml."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    for group, name, text in (
        ("drafter", "bigram", "_target_: my_parts.Bigram\nstep: 1\n"),
        ("tree", "fork", "_target_: my_parts.Fork\nways: 2\ntemperature: ${temperature}\n"),
        ("verifier", "first_child", "_target_: my_parts.FirstChild\n"),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)
    return tmp_path


def test_parts_from_outside(outside):
    """From the command line, by hydra.searchpath; the output stays the target's own."""
    command = [sys.executable, "-m", "specresearch", f"hydra.searchpath=[file://{outside}/conf]", "drafter=bigram"]
    command += ["tree=fork", "verifier=first_child", "target=tiny", "tracker=none", "limit=1", "max_new_tokens=6"]
    command += [f"hydra.run.dir={outside}/run"]
    done = subprocess.run(command, cwd=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout


def test_python_call():
    made = engine("target=tiny", "tracker=none", "drafter=ngram", "tree.topk=3", "max_new_tokens=16")
    result = made.generate("abcabcabc")
    assert len(result.ids) == 1 + sum(result.accepted_lengths) == 16
    pieces = list(made.stream("abcabcabc"))
    assert "".join(piece.text for piece in pieces) == result.text
    assert [piece.token for piece in pieces] == result.ids
    assert sum(not piece.drafted for piece in pieces) == 1 + len(result.accepted_lengths)
    assert made.generate([{"role": "user", "content": "abcabcabc"}]).ids == result.ids
    with pytest.raises(UserError, match="context"):
        made.generate("x" * 5000)


def test_engines_in_one_process_and_streams_side_by_side():
    first, second = (
        engine("target=tiny", "drafter=small_lm", "drafter.layers=1", "max_new_tokens=12") for _ in range(2)
    )
    alone = first.generate("abc").ids
    stream = second.stream("abc")
    token = next(stream).token
    first.generate("zzz")
    assert [token, *(piece.token for piece in stream)] == alone, "engines do not share a cache"
    stream = first.stream("abc")
    next(stream)
    first.generate("zzz")
    with pytest.raises(UserError, match="to its end"):
        list(stream)


@pytest.mark.parametrize("prompt", ["", " ", None, 3, [], ["a"], [{"rol": "user"}], [{"role": "user", "content": 3}]])
def test_python_call_refuses_what_is_no_prompt(prompt):
    with pytest.raises(UserError):
        engine("target=tiny", "drafter=ngram").generate(prompt)


@pytest.mark.parametrize(
    "override", ["max_new_tokens=0", "max_new_tokens=abc", "stop=abc", "seed=abc", "tree.tokp=3", "drafter=foo"]
)
def test_python_call_refuses_what_the_command_line_refuses(override):
    with pytest.raises(UserError) as error:
        engine("target=tiny", "drafter=ngram", override)
    assert len(str(error.value).splitlines()) == 1


def test_a_part_that_breaks_says_why(outside):
    (outside / "my_parts.py").write_text(
        "class Bigram:\n    def __init__(self, target, *, step):\n        raise OSError('boom')\n"
    )
    command = [sys.executable, "-m", "specresearch", f"hydra.searchpath=[file://{outside}/conf]", "drafter=bigram"]
    command += ["target=tiny", "tracker=none", f"hydra.run.dir={outside}/run"]
    done = subprocess.run(command, cwd=outside, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "boom" in line
    assert "my_parts.Bigram" in line


def test_a_drafter_of_the_wrong_shape_is_refused():
    made = engine("target=tiny", "max_new_tokens=8", "drafter=small_lm", "drafter.layers=1")
    expand = made.parts.drafter.expand
    made.parts.drafter.expand = lambda frontier: expand(frontier)[:, 0]
    with pytest.raises(UserError, match="drafter answered with logits"):
        made.generate("abc")
