"""Draft models of another vocabulary: what tokens write, the law of those in common, drafts told as text, and the loop."""

import json
import random
import sys
from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS
from helpers import decode, naive_greedy, trees
from mutants import Changed
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vocabularies import byte_level, permuted, random_model, sentencepiece

from specresearch import cli
from specresearch.drafters.small_lm import SmallLM
from specresearch.lossless.blackbox import BlackBox
from specresearch.lossless.enumeration import Table, completed_laws, total_variations
from specresearch.lossless.exact import shapes
from specresearch.lossless.reference import Reference, judge
from specresearch.lossless.whitebox import Log, WhiteBox, findings
from specresearch.models.reading import LOOKBACK, OwnTokens
from specresearch.models.retelling import retell
from specresearch.models.spelling import Spelling, shared, twins
from specresearch.models.vocabulary import SharedTokens
from specresearch.rng import CounterRng
from specresearch.sampling import Sampler
from specresearch.trees.static import Chain
from specresearch.types import Step, UserError
from specresearch.verifiers.block import Block
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.traversal import Traversal

WAYS = ("intersection", "text")
ODD = ["", " ", "  two  spaces ", "\n\n", "ïöü 漢字 🙂", "ing of the the", "<s> or </s>", "a" * 40, "▁Ġ", "\t x", "日"]

BYTES = [chr(33 + i) for i in range(90)] + ["Ġ", "Ċ", "ł", "æ", "Ĺ", "¥"]
WORDS = ["th", "the", "Ġthe", "in", "ing", "Ġo", "Ġof", "Ġ#"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("Ġ", "o"), ("Ġo", "f"), ("Ġ", "#")]


def numbered(names, seed):
    names = list(dict.fromkeys(names))
    random.Random(seed).shuffle(names)
    return {name: id for id, name in enumerate(names)}


def bytewise(seed=0, names=(*BYTES, *WORDS, "<s>", "</s>"), merges=MERGES):
    made = byte_level(numbered(names, seed), merges, bos_token="<s>", eos_token="</s>")
    return Spelling(made, len(made), "ours")


def piecewise(seed=1):
    names = [f"<0x{b:02X}>" for b in range(256)] + [chr(c) for c in range(33, 127)] + ["▁", "<unk>", "<s>", "</s>"]
    merges = [(a.replace("Ġ", "▁"), b.replace("Ġ", "▁")) for a, b in MERGES]
    made = sentencepiece(numbered([*names, *map("".join, merges)], seed), merges, bos_token="<s>", eos_token="</s>")
    return Spelling(made, len(made), "theirs")


# -- what tokens write ---------------------------------------------------------------------------------------------------


def test_both_ways_of_spelling_are_one_in_bytes():
    a, b = bytewise(), piecewise()
    get = lambda spelling, name: spelling.pieces[spelling.tokenizer.get_vocab()[name]]  # noqa: E731
    assert get(a, "Ġthe") == get(b, "▁the") == b" the"
    assert get(a, "Ċ") == get(b, "<0x0A>") == b"\n"
    assert get(a, "æ") == get(b, "<0xE6>") == b"\xe6"  # a third of a character
    assert get(b, "<0x41>") == get(b, "A") == b"A" and b.ids[b"A"] == b.tokenizer.get_vocab()["A"]
    assert get(a, "</s>") is None and a.specials["</s>"] == a.tokenizer.get_vocab()["</s>"]


@pytest.mark.parametrize("made", [bytewise, piecewise], ids=["bytes", "sentencepiece"])
def test_encoding_writes_exactly_what_was_given(made):
    full = made() if made is piecewise else made(names=(*byte_names(), *WORDS, "<s>", "</s>"))
    g = random.Random(0)
    for data in [*(text.encode() for text in ODD), *(g.randbytes(g.randrange(12)) for _ in range(60))]:
        for begin in (0, 1):  # 1: often the middle of a character
            assert full.join(full.encode(data[begin:])) == data[begin:]
            assert full.join(full.encode(data[begin:], opening=True)) in (data[begin:], b" " + data[begin:])


def byte_names():
    from specresearch.models.spelling import byte_alphabet

    return list(byte_alphabet())


def test_encoding_is_the_tokenizers_own_where_it_can_be():
    for spelling in (bytewise(), piecewise()):
        names = {id: name for name, id in spelling.tokenizer.get_vocab().items()}
        assert [names[i].replace("▁", "Ġ") for i in spelling.encode(b" the of")] == ["Ġthe", "Ġof"]
        assert [names[i].replace("▁", "Ġ") for i in spelling.encode(b"ing of")] == ["ing", "Ġof"]  # no space in front


def test_a_wordpiece_tokenizer_is_refused():
    made = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="neither byte-level nor of SentencePiece"):
        Spelling(PreTrainedTokenizerFast(tokenizer_object=made), 3, "x")


@pytest.mark.parametrize("seeds", [(0, 1), (5, 6)])
def test_shared_tokens_are_found_by_what_they_write(seeds):
    a, b = bytewise(seeds[0]), piecewise(seeds[1])
    pairs = shared(a, b, twins(a, b, ([a.specials["</s>"]], [b.specials["</s>"]])))
    ours, theirs = zip(*pairs)
    assert list(ours) == sorted(set(ours)) and len(set(theirs)) == len(theirs)
    name = {id: token for token, id in a.tokenizer.get_vocab().items()}
    named = {name[i]: {v: k for k, v in b.tokenizer.get_vocab().items()}[j] for i, j in pairs}
    assert named["Ġthe"] == "▁the" and named["Ċ"] == "<0x0A>" and named["t"] == "t" and named["</s>"] == "</s>"
    assert set(named) == {*BYTES, *WORDS, "<s>", "</s>"}


def test_ends_of_text_are_twins_by_what_they_are_for():
    a, b = bytewise(), bytewise(3, names=(*BYTES, "<s>", "<|end|>"), merges=())
    b.specials = {"<s>": b.specials["<s>"], "<|end|>": 7}
    special = twins(a, b, ([a.specials["</s>"]], [7]))
    assert special == {a.specials["<s>"]: b.specials["<s>"], a.specials["</s>"]: 7}
    assert twins(a, a, ([a.specials["</s>"]], [a.specials["</s>"]])) == {i: i for i in a.specials.values()}


# -- the law -------------------------------------------------------------------------------------------------------------


def restricted(logits, ours, theirs):
    """By the book: the chance of each string that both know, renormalised. -> [size of ours]"""
    chance = logits.double().softmax(-1)
    q = [0.0] * len(ours.pieces)
    for piece, id in ours.ids.items():
        if piece in theirs.ids:
            q[id] = float(chance[theirs.ids[piece]])
    return torch.tensor(q, dtype=torch.float64) / sum(q)


class Misrouted(SharedTokens):
    """The columns in an order of their own: what each is called belongs to another."""

    def __init__(self, pairs, device):
        super().__init__(pairs, device)
        self.theirs = self.theirs.sort().values


def matches(kind):
    a, b = bytewise(), piecewise()
    logits = torch.randn(len(b.pieces), dtype=torch.float64)
    spread = kind(shared(a, b, {}), logits.device).spread(logits, len(a.pieces))
    return torch.allclose(spread.softmax(-1), restricted(logits, a, b), atol=1e-12)


def test_tokens_are_translated_one_by_one():
    a, b = bytewise(), piecewise()
    pairs = shared(a, b, {})
    ours, theirs = torch.tensor(pairs).T
    assert len(pairs) < len(a.pieces) and torch.equal(SharedTokens(pairs, ours.device).translate(ours), theirs)


def test_q_is_the_draft_models_law_on_the_strings_in_common():
    assert matches(SharedTokens)
    assert not matches(Misrouted)


class InCommon:
    """A draft model given by a table of its own tokens, asked through the shipped expansion and warp: stands for q's table."""

    def __init__(self, own, pairs, vocab, renormalise=True):
        self.own, self.shared, self.vocab = own, SharedTokens(pairs, torch.device("cpu")), vocab
        self.renormalise = renormalise

    def at(self, path, instance):
        theirs = torch.where(path >= 0, self.shared.translate(path.clamp(min=0)), -1)
        logits = self.own.at(theirs, instance).log()
        if self.renormalise:
            return Sampler(temperature=1.0).warp(self.shared.spread(logits, self.vocab))
        return self.shared.spread(logits, self.vocab).exp()  # what the tokens not in common had is lost


OVERLAPS = {"all, permuted": (2, 2, [(0, 1), (1, 0)]), "two of three": (3, 4, [(0, 3), (2, 1)]),
            "one": (2, 3, [(1, 2)]), "more than the target": (2, 5, [(0, 4), (1, 0)])}  # fmt: skip


def worst(policy, verifier, overlap, renormalise=True, count=3):
    vocab, theirs, pairs = OVERLAPS[overlap]
    g = torch.Generator().manual_seed(0)
    p = Table.stack([Table.random(vocab, policy.depth + 1, g) for _ in range(count)])
    own = Table.stack([Table.random(theirs, policy.depth + 1, g) for _ in range(count)])
    laws = completed_laws(policy, verifier, p, InCommon(own, pairs, vocab, renormalise))
    return float(total_variations(laws, p).max())


SHAPES = ["chain iid", "wide iid", "2x2 without_replacement"]
RULES = [Rejection(), Block(), Traversal(), SampleAndMatch()]


def fits(rule, shape):
    policy, chain = shapes()[shape], shape.startswith("chain")
    law = {policy.law, "without_replacement"} if chain else {policy.law}
    return law & rule.laws and policy.growth in rule.growths and (chain or not rule.chain_only)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    ("rule", "shape"),
    [(rule, shape) for rule in RULES for shape in SHAPES if fits(rule, shape)],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_trees_of_tokens_in_common_are_exact(rule, shape, overlap):
    assert worst(shapes()[shape], rule, overlap) < 1e-12


def test_a_q_that_is_not_renormalised_is_seen():
    chain = Chain(depth=2, temperature=1.0, draw="iid")
    assert worst(chain, Rejection(), "two of three", renormalise=False) > 1e-2
    assert worst(chain, Rejection(), "all, permuted", renormalise=False) < 1e-12  # nothing is lost there


def test_drafts_drawn_in_one_order_and_claimed_in_another_are_seen():
    """The fault of a head whose columns stand in another order than the ids that they are scattered to."""
    chain = Chain(depth=2, temperature=1.0, draw="iid")
    swapped = Changed(chain, lambda tree: replace(tree, q=tree.q[..., [2, 1, 0]]))
    assert worst(swapped, Rejection(), "two of three") > 1e-2


# -- drafts told as text -------------------------------------------------------------------------------------------------


def told(recent, drafted, ours, theirs):
    ids = ours.tokenizer.get_vocab()
    own = theirs.tokenizer.get_vocab()
    special = {own["</s>"]: ids["</s>"]}
    names = {id: name for name, id in ids.items()}
    found = retell([ids[t] for t in recent], [own[t] for t in drafted], ours, theirs, special)
    return [(names[id], count) for id, count in found]


def test_a_draft_is_told_in_the_targets_tokens():
    a, b = bytewise(), piecewise()
    assert told(["Ġof"], ["▁", "t", "h", "e", "in"], a, b) == [("Ġthe", 4), ("in", 5)]
    assert told(["Ġof"], ["▁the", "</s>", "t"], a, b) == [("Ġthe", 1), ("</s>", 2)]
    assert told(["Ġof"], ["</s>"], a, b) == [("</s>", 1)]
    assert told(["Ġof"], ["▁the", "<s>", "t"], a, b) == [("Ġthe", 1)]  # a special token that the target lacks
    assert told([], ["<0xE6>", "<0x97>", "<0xA5>"], a, b) == [("æ", 1), ("Ĺ", 2), ("¥", 3)]


def test_what_was_emitted_stays_though_the_text_could_be_cut_otherwise():
    a, b = bytewise(), piecewise()
    assert told(["t"], ["h", "e", "▁of"], a, b) == [("h", 1), ("e", 2), ("Ġof", 3)]  # "the" would reach over the seam
    assert told(["t", "h"], ["▁of"], a, b) == [("Ġof", 1)]  # written "th" by the tokenizer: the seam is where it was
    assert told(["</s>", "Ġ"], ["the"], a, b) == [("the", 1)]


# -- the loop ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    """Draft models for the tiny target: itself with all its bytes under other ids, some without, and one of SentencePiece."""
    at = {name: tmp_path_factory.mktemp(name) for name in ("twin", "part", "piece", "short")}
    pieces = piecewise().tokenizer
    return {
        "twin": permuted(target, at["twin"], extra=5),
        "part": permuted(target, at["part"], without=range(40, 90), merges=[("Ġ", "o"), ("Ġ", "c")]),
        "piece": random_model(pieces, at["piece"]),
        "short": random_model(pieces, at["short"], positions=144),
    }


@pytest.fixture
def exact_reading(monkeypatch):
    """At every root the draft model's cached pass is compared with a whole new forward over what the row tells."""
    seen, root = [], OwnTokens.root

    def compared(self, step):
        logits = root(self, step)
        for row in range(len(self.ids)):
            if bool(step.live[row]):
                plain = self.model.model(input_ids=torch.tensor([self.ids[row]])).logits[0, -1]
                assert (plain - logits[row, 0]).abs().max() < 1e-9
                seen.append(len(self.ids[row]))
        return logits

    monkeypatch.setattr(OwnTokens, "root", compared)
    return seen


@pytest.fixture(scope="module")
def prompts(target):
    return [target.encode(text) for text in PROMPTS[:3]]


@pytest.fixture(scope="module")
def expected(target, prompts):
    return [naive_greedy(target, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("vocab", WAYS)
@pytest.mark.parametrize(("name", "tree"), [("part", "dynamic"), ("part", "chain"), ("piece", "static")])
def test_greedy_answers_are_the_targets(target, folders, prompts, expected, exact_reading, vocab, name, tree):
    drafter = SmallLM(target, id=folders[name], dtype="float64", vocab=vocab)
    turns = decode(target, prompts, drafter=drafter, policy=trees()[tree], batch=2, budget=12)
    assert [turn.output_ids for turn in turns] == expected and exact_reading
    if name == "part":
        assert sum(s["emitted"] for t in turns for s in t.steps) > 1.1 * sum(len(t.steps) for t in turns)


@pytest.mark.parametrize("vocab", WAYS)
def test_sampled_answers_are_the_same_alone_and_in_a_batch(target, folders, prompts, vocab):
    drafter = SmallLM(target, id=folders["part"], dtype="float64", vocab=vocab)
    how = {"drafter": drafter, "policy": Chain(depth=3, temperature=0.8), "sampler": Sampler(temperature=0.8)}
    if vocab == "text":
        how["verifier"] = SampleAndMatch()
    alone, together = (decode(target, prompts, batch=n, budget=12, **how) for n in (1, 3))
    assert [t.output_ids for t in alone] == [t.output_ids for t in together]
    assert [t.steps[0]["tokens"] for t in alone] == [t.steps[0]["tokens"] for t in together]


def accepted(target, folder, prompts, seed=0):
    drafter = SmallLM(target, id=folder, dtype="float64", vocab="intersection")
    how = {"policy": Chain(depth=4, temperature=1.0), "sampler": Sampler(temperature=1.0)}
    turns = decode(target, prompts, drafter=drafter, budget=16, seed=seed, **how)
    steps = [step["emitted"] for turn in turns for step in turn.steps]
    return sum(steps) / len(steps)


def test_the_target_under_other_ids_is_always_accepted(target, folders, prompts, monkeypatch):
    """q is p then, to the last digit; columns that are called by each other's names would show."""
    assert accepted(target, folders["twin"], prompts) == 5
    monkeypatch.setattr("specresearch.drafters.small_lm.SharedTokens", Misrouted)
    assert accepted(target, folders["twin"], prompts) < 2


def run_checked(target, folder, prompts, policy, rounds=2, vocab="intersection", rule=None):
    """-> the white box's findings and the black box of many sampled answers."""
    log, sampler, box = Log(), Sampler(temperature=0.8), BlackBox(alpha=1e-3)
    drafter = SmallLM(target, id=folder, dtype="float64", vocab=vocab)
    reference = Reference(target, sampler)
    for seed in range(rounds):
        how = {"drafter": drafter, "policy": policy, "sampler": sampler, "seed": seed, "batch": 3, "budget": 40}
        turns = decode(target, prompts, verifier=WhiteBox(rule or Rejection(), log), **how)
        judge(reference, [turn.line() for turn in turns], box)
    return {f.name: f.verdict for f in findings(log)}, box


def test_sampled_answers_pass_both_boxes(target, folders, prompts):
    found, box = run_checked(target, folders["part"], prompts, Chain(depth=3, temperature=0.8))
    assert box.verdict == "consistent" and "violation" not in found.values() and found["drafts"] == "consistent"
    found, box = run_checked(
        target, folders["part"], prompts, Chain(depth=3, temperature=0.8), 1, "text", SampleAndMatch()
    )
    assert box.verdict == "consistent" and "violation" not in found.values()


def test_drafts_claimed_in_another_order_fail_both_boxes(target, folders, prompts):
    chain = Chain(depth=3, temperature=0.8)
    rolled = Changed(chain, lambda tree: replace(tree, q=tree.q.roll(1, -1)))
    found, box = run_checked(target, folders["part"], prompts, rolled, 4)
    assert found["drafts"] == "violation" and box.verdict == "violation"


def test_a_row_longer_than_the_draft_model_goes_on(target, folders, exact_reading):
    """The oldest half is forgotten."""
    prompt = target.encode("one two three " * 12)
    drafter = SmallLM(target, id=folders["short"], dtype="float64", vocab="intersection")
    (turn,) = decode(target, [prompt], drafter=drafter, policy=trees()["chain"], budget=30)
    assert turn.output_ids == naive_greedy(target, prompt, 30)
    assert 144 // 4 < exact_reading[0] <= max(exact_reading) <= 144 - drafter.reader.slots


def test_words_that_go_on_are_read_anew(target, tmp_path, exact_reading):
    """Letter by letter: "ab" is one token until "c" comes, then "a" and "bc"; what the cache held is overwritten."""
    merges = [("b", "c"), ("a", "b")]
    tokenizer = byte_level(numbered([*byte_names(), "bc", "ab", "</s>"], 4), merges, eos_token="</s>")
    drafter = SmallLM(target, id=random_model(tokenizer, tmp_path), dtype="float64", vocab="intersection")
    ids = torch.tensor([target.encode("x abc abcd")])
    drafter.reserve(1, ids.shape[1], 4)
    drafter.extend([0], ids, torch.tensor([2]), None)
    one = torch.ones(1, dtype=torch.long)
    for at in range(2, ids.shape[1]):
        drafter.reader.root(Step(ids[:, at], one, one * at, one > 0, one * 99, ids, CounterRng(one, one), at))
        drafter.reader.lag = 1
    pieces = [drafter.reader.theirs.pieces[id] for id in drafter.reader.ids[0]]
    assert pieces == [b"x", b" ", b"a", b"bc", b" ", b"a", b"bc", b"d"]
    assert exact_reading == [3, 3, 4, 5, 6, 6, 7, 8]


def test_a_row_with_more_tokens_than_the_targets_gets_a_larger_cache(
    target, folders, prompts, exact_reading, monkeypatch
):
    reserve = OwnTokens.reserve
    monkeypatch.setattr(OwnTokens, "reserve", lambda self, batch, capacity, slots: reserve(self, batch, 4, slots))
    drafter = SmallLM(target, id=folders["piece"], dtype="float64", vocab="text")
    drafter.model.cache = None
    turns = decode(target, prompts, drafter=drafter, policy=trees()["chain"], batch=2, budget=20)
    assert [turn.output_ids for turn in turns] == [naive_greedy(target, prompt, 20) for prompt in prompts]
    assert drafter.model.cache.slots > drafter.reader.slots + max(exact_reading) > drafter.reader.slots + 30


def test_models_and_tokenizers_stay_as_they_were(target, folders, prompts):
    drafter = SmallLM(target, id=folders["part"], dtype="float64", vocab="intersection")
    models = (target, drafter.model)

    def state():
        texts = [m.tokenizer.backend_tokenizer.to_str() for m in models]
        return texts, [m.fingerprint() for m in models], [str(m.model.config) for m in models]

    before = state()
    decode(target, prompts[:2], drafter=drafter, policy=trees()["chain"], budget=8)
    decode(target, prompts[:2], drafter=SmallLM(target, id=folders["part"], dtype="float64", vocab="text"),
           policy=trees()["chain"], budget=8)  # fmt: skip
    assert state() == before


# -- the command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "sampling"),
    [
        ("intersection", ["temperature=0.8"]),
        ("text", ["temperature=0"]),
    ],
    ids=str,
)
def test_the_command_with_second_turns(folders, tmp_path, monkeypatch, vocab, sampling):
    lines = [{"turns": ["one two three", "and more"]}, {"turns": ["hello, hello"]}, {"turns": ["zzz", "yyy", "xxx"]}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = [
        "target=tiny",
        "drafter=small_lm",
        f"drafter.id={folders['part']}",
        f"drafter.vocab={vocab}",
        "tree=chain",
    ]
    arguments += ["prompts=file", f"prompts.path={tmp_path}/q.jsonl", "max_new_tokens=12", "batch_size=2", *sampling]
    monkeypatch.setattr(sys, "argv", ["specresearch", *arguments, "tracker=none", f"hydra.run.dir={tmp_path}/run"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert exit.value.code == 0 and summary["prompts"] == 6
    assert summary["lossless"]["verdict"] == ("lossless" if sampling == ["temperature=0"] else "consistent")


def test_mistakes_are_told_in_one_line(target, folders, tmp_path):
    for keys, says in [
        (
            {"vocab": "both", "id": folders["part"]},
            "drafter.vocab=both is unknown: use one of same, intersection, text",
        ),
        ({"vocab": "text", "layers": 1}, "give drafter.id"),
        ({"vocab": "intersection"}, "give drafter.id"),
        ({"id": folders["part"]}, "use drafter.vocab=intersection or text"),
    ]:
        with pytest.raises(UserError, match=says):
            SmallLM(target, dtype="float64", **keys)
    drafter = SmallLM(target, id=folders["short"], dtype="float64", vocab="text")
    with pytest.raises(UserError, match="takes 144 tokens"):
        drafter.reserve(1, 50, 2 * LOOKBACK)


@pytest.fixture(scope="module")
def own_words(tmp_path_factory):
    """A model with a byte-level tokenizer of its own, both trained on what the real target wrote."""
    from test_experiments import experiment

    folder = tmp_path_factory.mktemp("own_words")
    experiment("vocabulary").main([f"out={folder}", "steps=200", "minutes=60"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("vocab", WAYS)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_real_target_with_a_draft_model_of_its_own_words(own_words, tmp_path, monkeypatch, vocab, temperature):
    arguments = ["drafter=small_lm", f"drafter.id={own_words}", f"drafter.vocab={vocab}", f"temperature={temperature}"]
    arguments += ["tree=chain", "tree.depth=3", "limit=7", "max_new_tokens=32", "batch_size=2", "tracker=none"]
    arguments += ["verifier=sample_and_match"] if vocab == "text" else []
    monkeypatch.setattr(sys, "argv", ["specresearch", *arguments, f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert exit.value.code == 0 and summary["lossless"]["verdict"] == ("consistent" if temperature else "lossless")
    assert summary["mean_accepted_length"] > 1.05
