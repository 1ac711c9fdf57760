"""Constrained decoding on trees against languages written out word by word, which share no code with the grammar's library."""

import json
import re
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import decode, drafters, trees

import specresearch
from specresearch import certify, cli
from specresearch.drafters.none import NoDrafter
from specresearch.grammar.backend import Compiled, library, parse
from specresearch.grammar.rows import Rows, Walk, masks, standing
from specresearch.grammar.source import ebnf, json_schema, regex
from specresearch.kernels.mask import pack_words, unpack
from specresearch.kernels.tree import node_paths
from specresearch.lossless.blackbox import BlackBox
from specresearch.lossless.enumeration import Outcomes, Table, complete, outcomes, total_variations
from specresearch.lossless.exact import EXACT
from specresearch.lossless.greedy import GreedyJudge, TokensJudge
from specresearch.lossless.reference import Reference, judge
from specresearch.models import tiny
from specresearch.sampling import Sampler, TreeProbs
from specresearch.trees.dynamic import DynamicTree
from specresearch.trees.static import Chain, StaticTree
from specresearch.types import Frontier, Step, Tree, UserError
from specresearch.verifiers.block import Block
from specresearch.verifiers.rejection import Rejection
from specresearch.verifiers.sample_and_match import SampleAndMatch
from specresearch.verifiers.spectr import SpecTr
from specresearch.verifiers.target_only import TargetOnly
from specresearch.verifiers.traversal import Traversal
from specresearch.verifiers.typical import Typical

pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")

# -- a vocabulary of four: a, b, c, EOS ----------------------------------------------------------------------------------

LETTERS, EOS = "abc", 3
PATTERNS = {  # with all words that they match, of up to six letters
    "(a|b)(b|c)?": ["a", "b", "ab", "ac", "bb", "bc"],
    "a(b|ca?)?b?": ["a", "ab", "ac", "aca", "abb", "acb", "acab"],
    "[ab]*c": ["".join(w) + "c" for n in range(6) for w in product("ab", repeat=n)],
}


def letters(pattern: str, monkeypatch) -> Compiled:
    tokens = library().TokenizerInfo([*LETTERS, "<eos>"], vocab_size=4, stop_token_ids=[EOS])
    monkeypatch.setattr("specresearch.grammar.backend.vocabulary", lambda *_: tokens)
    target = SimpleNamespace(vocab_size=4, eos=(EOS,), device=torch.device("cpu"))
    return Compiled(parse("regex", pattern, {}, ""), target, pattern, "regex", False)


def permitted(words: list[str], path: tuple[int, ...]) -> set[int] | None:
    """Tokens that may follow, from the list of words alone; None off the grammar. Behind EOS, EOS."""
    text = "".join(LETTERS[t] for t in path if t != EOS)
    if EOS in path:
        return {EOS} if text in words and {*path[path.index(EOS) :]} == {EOS} else None
    found = {LETTERS.index(w[len(text)]) for w in words if w.startswith(text) and len(w) > len(text)}
    found |= {EOS} if text in words else set()
    return found or None


def constrained(p: Table, words: list[str]) -> Table:
    """The law of constrained plain decoding: p at each prefix, restricted to what the words permit; EOS for ever after EOS."""
    laws = p.laws.clone()
    for length in range(p.horizon):
        for path in product(range(4), repeat=length):
            code = int(p.code(torch.tensor(path, dtype=torch.long)))
            kept = permitted(words, path) or set(range(4))
            off = torch.tensor([token not in kept for token in range(4)])
            laws[:, code] = laws[:, code].masked_fill(off, 0.0)
    return Table(laws / laws.sum(-1, keepdim=True), p.horizon)


def shipped(grammar: Compiled):
    """p as the loop makes it: masks of the tree by the grammar's rows, applied by the sampler."""

    def laws(tree: Tree, table: Table, instance: torch.Tensor) -> TreeProbs:
        same, back = torch.cat([tree.tokens, tree.parent, tree.valid.long()], 1).unique(dim=0, return_inverse=True)
        tokens, parent, valid = same.chunk(3, 1)
        rows = Rows(grammar, len(same), tokens.device)
        rows.start(range(len(same)))
        zero = torch.zeros_like(tokens)
        allow = rows.look(Tree(tokens, parent, zero, valid.bool(), zero.float(), "point", "static", tree.levels))()
        path = node_paths(tree.parent, tree.tokens, max(tree.levels, 1))
        length = torch.zeros(len(back), dtype=torch.long)
        step = Step(length, length, length, length == 0, length, length[:, None], None, 0)
        return TreeProbs(Sampler(temperature=1), table.at(path, instance).log(), step, replace(tree, allow=allow[back]))

    return laws


def cut(found: Outcomes) -> Outcomes:
    """As the loop does: nothing behind EOS is emitted."""
    after = (found.block == EOS).long().cumsum(1) - (found.block == EOS).long() > 0
    return replace(found, block=torch.where(after, -1, found.block))


RULES = {
    "rejection of points": (Rejection(), StaticTree(widths=[2, 1], temperature=1, draw="topk")),
    "rejection, dynamic": (Rejection(), DynamicTree(depth=2, topk=2, size=5, temperature=1)),
    "rejection without replacement": (
        Rejection(),
        StaticTree(widths=[2, 1], temperature=1, draw="without_replacement"),
    ),
    "rejection, iid": (Rejection(), StaticTree(widths=[2, 1], temperature=1, draw="iid")),
    "target_only": (TargetOnly(), StaticTree(widths=[3, 2], temperature=1, draw="topk")),
    "sample_and_match": (SampleAndMatch(), StaticTree(widths=[2, 2], temperature=1, draw="topk")),
    "block": (Block(), Chain(depth=2, temperature=1)),
    "traversal": (Traversal(), StaticTree(widths=[2, 1], temperature=1, draw="without_replacement")),
    "spectr": (SpecTr(), StaticTree(widths=[2, 1], temperature=1, draw="iid")),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("pattern", "drafts"), [("(a|b)(b|c)?", "free"), ("a(b|ca?)?b?", "constrained")])
def test_the_law_is_that_of_constrained_plain_decoding(rule, pattern, drafts, monkeypatch):
    """Every outcome of one step, drafts off the grammar included, adds up to the constrained law: TV below 1e-12."""
    words, grammar = PATTERNS[pattern], letters(pattern, monkeypatch)
    verifier, policy = RULES[rule]
    horizon, generator = policy.depth + 1, torch.Generator().manual_seed(len(pattern))
    p, q = (Table.random(4, horizon, generator) for _ in range(2))
    wanted = constrained(p, words)
    q = constrained(q, words) if drafts == "constrained" else q
    law = complete(wanted, map(cut, outcomes(policy, verifier, p, q, shipped(grammar))))
    assert float(total_variations(law, wanted).max()) < EXACT
    assert float(total_variations(p.law(), wanted).min()) > 0.1, "the grammar forbids something"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_of_random_trees(pattern, monkeypatch):
    """Each node that p can reach has what the words permit after its path; the matcher ends where it stood."""
    words, grammar = PATTERNS[pattern], letters(pattern, monkeypatch)
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for committed in [(), (0,), (0, 1)]:
        if permitted(words, committed) is None:
            continue
        rows = Rows(grammar, 3, torch.device("cpu"))
        rows.start([0, 2])  # row 1 stands idle
        for row in (0, 2):
            rows.advance(row, committed)
        tokens = torch.randint(0, 4, (3, 24), generator=generator)
        parent = (torch.rand(3, 24, generator=generator) * torch.arange(24)).long()
        parent[:, 0] = -1
        valid = torch.rand(3, 24, generator=generator) > 0.1
        valid[:, 0] = True
        valid &= valid.gather(1, parent.clamp(min=0))
        tree = Tree(tokens, parent, parent, valid, tokens.float(), "point", "static", 23)
        for _ in range(2):  # twice: rolled back whole
            allow = unpack(rows.look(tree)(), 4)
        paths = node_paths(parent, tokens, 23)
        assert allow[1].all()
        for row, node in product((0, 2), range(24)):
            chain, up = [], node
            while up >= 0:
                chain, up = [*chain, up], int(parent[row, up])
            own = tuple(t for t in paths[row, node].tolist() if t >= 0)
            kept = permitted(words, committed + own)
            listed = len(committed + own) <= 4  # longer words are not among those written out
            reached = valid[row, chain].all() and kept is not None and own.count(EOS) <= 1 and listed
            if reached:
                assert set(allow[row, node].nonzero()[:, 0].tolist()) == kept, (committed, own)
                seen.add(kept == {EOS})
    assert seen == {True, False} or pattern == "[ab]*c"


def test_masks_of_a_frontier(monkeypatch):
    """What the drafter is asked about has the masks of its paths; off the grammar, and behind EOS, nothing is proposed."""
    pattern = "a(b|ca?)?b?"
    words, grammar = PATTERNS[pattern], letters(pattern, monkeypatch)
    rows = Rows(grammar, 1, torch.device("cpu"))
    rows.start([0])
    rows.advance(0, [0])
    paths = [(), (2,), (2, 0), (0,), (2, 1), (1, 1), (3,), (2, 0), (0, 1), (1,)]
    path = torch.tensor([[[*p, -1, -1][:2] for p in paths]])
    step = Step(*[torch.zeros(1, dtype=torch.long)] * 5, torch.zeros(1, 1), None, 0)
    allow = unpack(rows.frontier(Frontier(step, path[..., 0], path[..., 0], path, path, path[..., 0], 0)), 4)
    for place, own in enumerate(paths):
        kept = (permitted(words, (0, *own)) or set()) if EOS not in own else set()
        assert set(allow[0, place].nonzero()[:, 0].tolist()) == kept, own


def test_a_walk_goes_back_and_forth(monkeypatch):
    walk = Walk(letters("a(b|ca?)?b?", monkeypatch).matcher())
    assert walk.to([0, 2, 0]) and walk.to([0, 1, 1]) and not walk.to([0, 0])
    assert walk.path == [0]
    assert walk.to([0, 2, 1, EOS]) and walk.matcher.terminated and not walk.to([0, 2, 1, EOS, EOS])
    assert walk.to([]) and not walk.to([1]) and walk.to([0])


# -- a random model of bytes ---------------------------------------------------------------------------------------------

WORDS = sorted("".join(w) for n in (1, 2, 3) for w in product(["yes", "no", "not yet", "{}", "é"], repeat=n))
SPELLED: list[list[int]] = []  # in the tiny target's tokens
RULES_OF_WORDS = 'root ::= word | word word | word word word\nword ::= "yes" | "no" | "not yet" | "{}" | "é"'
PROMPTS = [
    list(b"yesnoyesno maybe"),
    list(b"x"),
    list(b"not yet not yet not"),
    list(b"{}{}{}"),
    list(b"zz"),
    list(b"no"),
]


@pytest.fixture(scope="module")
def words_grammar(target) -> Compiled:
    return ebnf(rules=RULES_OF_WORDS, draft=False).compile(target)


def following(target, ids: list[int]) -> set[int]:
    """Tokens that may follow, from the list of words alone."""
    if not SPELLED:
        SPELLED.extend(list(target.tokenizer(word).input_ids) for word in WORDS)
    found = {s[len(ids)] for s in SPELLED if s[: len(ids)] == ids and len(s) > len(ids)}
    return found | ({target.eos[0]} if ids in SPELLED else set())


@torch.no_grad()
def naive(target, prompt: list[int], budget: int) -> list[int]:
    """Constrained greedy decoding by a whole forward a token."""
    ids: list[int] = []
    while len(ids) < budget and target.eos[0] not in ids:
        logits = target.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
        kept = following(target, ids)
        ids.append(max(sorted(kept), key=lambda token: float(logits[token])))
    return ids


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    return [naive(target, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("drafter", "tree", "draft"),
    [
        ("none", "chain", False),
        ("ngram", "dynamic", False),
        ("small_lm", "best_first", True),
        ("early_exit", "static", True),
        ("early_exit", "chain", False),
    ],
)
def test_greedy_answers_equal_naive_constrained_decoding(
    target, draft_folder, words_grammar, expected, drafter, tree, draft, monkeypatch
):
    """Rows are refilled: six answers in two rows. Every answer is one of the words."""
    monkeypatch.setattr(words_grammar, "draft", draft)
    sampler = Sampler(grammar=words_grammar)
    part, policy = drafters(target, draft_folder)[drafter], trees()[tree]
    turns = decode(target, PROMPTS, drafter=part, policy=policy, sampler=sampler, batch=2)
    assert [turn.output_ids for turn in turns] == expected
    assert all(turn.finish == "eos" and turn.text in WORDS for turn in turns)


def test_a_rule_that_asks_for_all_nodes_at_once_sees_the_same_law(target, draft_folder, words_grammar, expected):
    part = drafters(target, draft_folder)["early_exit"]
    policy, sampler = StaticTree(widths=[3, 2], temperature=0), Sampler(grammar=words_grammar)
    rule = Typical(posterior_threshold=0.09, posterior_alpha=0.3)
    turns = decode(target, PROMPTS, drafter=part, policy=policy, verifier=rule, sampler=sampler, batch=3)
    assert [turn.output_ids for turn in turns] == expected


def test_draft_masks_make_drafts_that_follow_the_grammar(target, draft_folder, words_grammar, monkeypatch):
    """With drafts masked, more is accepted, and no step drafts what the grammar forbids."""
    accepted = {}
    for draft in (False, True):
        monkeypatch.setattr(words_grammar, "draft", draft)
        policy, part = DynamicTree(depth=3, topk=2, size=6, temperature=0), drafters(target, draft_folder)["early_exit"]
        turns = decode(target, PROMPTS, drafter=part, policy=policy, sampler=Sampler(grammar=words_grammar))
        accepted[draft] = sum(len(t.output_ids) - 1 for t in turns) / sum(len(t.steps) for t in turns)
        off = 0
        for turn in turns:
            done = 1
            for step in turn.steps:
                for node, token in enumerate(step["tokens"][1:], 1):
                    above = step["parent"][node]
                    chain = []
                    while above > 0:
                        chain, above = [step["tokens"][above], *chain], step["parent"][above]
                    known = turn.output_ids[:done] + chain
                    if token >= 0 and target.eos[0] not in known:
                        off += token not in following(target, known)
                done += step["emitted"]
        assert (off == 0) == draft
    assert accepted[True] > accepted[False] + 0.3


@pytest.mark.parametrize("draft", [False, True])
def test_sampled_answers_are_words_and_the_black_box_agrees(target, draft_folder, words_grammar, draft, monkeypatch):
    monkeypatch.setattr(words_grammar, "draft", draft)
    sampler = Sampler(temperature=1.5, top_p=0.95, grammar=words_grammar)
    part, policy = drafters(target, draft_folder)["early_exit"], StaticTree(widths=[2, 1], temperature=1.5, draw="iid")
    box, reference = BlackBox(), Reference(target, sampler)
    turns = decode(target, PROMPTS * 5, drafter=part, policy=policy, sampler=sampler, batch=8)
    assert {turn.text for turn in turns} <= {*WORDS}
    assert len({turn.text for turn in turns}) > 5
    judge(reference, [turn.line() for turn in turns], box)
    assert box.verdict == "consistent" and box.impossible == 0
    free = judge(Reference(target, Sampler(temperature=1.5, top_p=0.95)), [t.line() for t in turns], BlackBox())
    assert free.verdict == "violation", "without the grammar, the same answers are no draws of the target's"


def test_checks_know_the_grammar(target, words_grammar, expected):
    """Teacher forcing passes what constrained decoding made, and names a token that the grammar forbids, or that is not the
    best of those that it allows."""
    sampler = Sampler(grammar=words_grammar)
    lines = [
        {"id": i, "turn": 0, "prompt_ids": prompt, "output_ids": ids, "steps": []}
        for i, (prompt, ids) in enumerate(zip(PROMPTS, expected))
    ]
    own = GreedyJudge(target, sampler, exact_replay=True, tree_size=64)
    assert all(own.compare(line, None)["equal"] for line in lines)
    tokens = TokensJudge(target, sampler)
    for line in lines:
        tokens.add(line)
    assert tokens.verdict == "lossless" and not tokens.near_ties
    other = next(ids for ids in expected if following(target, ids[:1]) != following(target, []))
    worse = max(following(target, []) - {other[0]})
    for token in (worse, 5):
        wrong = {"id": 9, "turn": 0, "prompt_ids": PROMPTS[0], "output_ids": [token], "steps": []}
        judged = TokensJudge(target, sampler)
        judged.add(wrong)
        assert judged.violations[0]["position"] == 0 and json.dumps(judged.violations, allow_nan=False)


def test_special_tokens_are_no_text(target):
    """A token that the text leaves out has no place in a grammar, whatever its name; one that is shown has its name's place."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<hidden>"]})
    tokenizer.add_tokens(["<shown>"])
    size, eos = len(tokenizer) + 5, (tokenizer.eos_token_id,)  # with padded rows of the head
    stub = SimpleNamespace(vocab_size=size, eos=eos, device=target.device, tokenizer=tokenizer)
    allow = torch.zeros(1, -(-size // 32), dtype=torch.int32)
    regex(pattern="[<>a-z]*", draft=False).compile(stub).matcher().fill(allow, 0)
    found = set(unpack(allow, size)[0].nonzero()[:, 0].tolist())
    shown, hidden, letter = tokenizer.convert_tokens_to_ids(["<shown>", "<hidden>", "a"])
    assert {shown, letter, *eos} <= found and hidden not in found and max(found) == shown
    for lacking in ({"eos": ()}, {"tokenizer": None}):
        with pytest.raises(UserError, match="a grammar needs a target with"):
            regex(pattern="a", draft=False).compile(SimpleNamespace(**{**vars(stub), **lacking}))


def test_standing(target, words_grammar):
    ids = [target.tokenizer.convert_tokens_to_ids(c) for c in "yesno"]
    eos = target.eos[0]
    assert standing(words_grammar, [*ids, eos]) == "complete"
    assert standing(words_grammar, ids) == "cut"
    assert standing(words_grammar, [eos]) == standing(words_grammar, [*ids[:1], eos]) == "off"
    allow = masks(words_grammar, [ids[0], ids[0], 5])
    assert allow is not None
    assert (allow[2] == -1).all() and not (allow[1] == -1).all(), "off the grammar, everything is let be"


def test_transformers_generate_is_constrained_alike(target, words_grammar, expected):
    sampler = Sampler(grammar=words_grammar)
    assert [target.generate(prompt, 24, sampler, ()) for prompt in PROMPTS] == expected
    looked = {"prompt_lookup_num_tokens": 4}  # an assisted mode asks about several prefixes, back and forth
    assert [target.generate(prompt, 24, sampler, (), **looked) for prompt in PROMPTS] == expected


def test_a_verifier_that_lets_through_what_is_forbidden_is_named(target, words_grammar):
    rows = Rows(words_grammar, 1, target.device)
    rows.start([0])
    with pytest.raises(UserError, match="token 5 was emitted, and the grammar forbids it"):
        rows.advance(0, [5])


# -- what people write ---------------------------------------------------------------------------------------------------

SCHEMA = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: json_schema(schema="nowhere.json", whitespace=None, draft=False), "nowhere.json cannot be read"),
        (lambda: json_schema(schema='{"type": ', whitespace=None, draft=False), "not JSON"),
        (lambda: json_schema(schema='{"type": "objct"}', whitespace=None, draft=False), 'Unsupported type "objct"'),
        (lambda: json_schema(schema=SCHEMA, whitespace=-1, draft=False), "grammar.whitespace=-1"),
        (lambda: json_schema(schema=SCHEMA, whitespace=None, draft="yes"), "grammar.draft=yes"),
        (lambda: regex(pattern="a(b", draft=False), "parenthesis is not closed"),
        (lambda: regex(pattern="", draft=False), "use a text"),
        (lambda: ebnf(rules='root ::= "a" b', draft=False), 'Rule "b" is not defined'),
    ],
)
def test_mistakes_are_said_in_one_line(make, says):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        make()
    assert len(str(error.value).splitlines()) == 1 and "/project/" not in str(error.value)


WHOLE = {"type": "integer"}
TWO = {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}}
LISTS = {"type": "array", "items": WHOLE}


@pytest.mark.parametrize(
    ("schema", "breaks_it", "said"),
    [
        (LISTS | {"uniqueItems": True}, "[1,1]", "uniqueItems"),
        (LISTS | {"contains": {"const": 5}}, "[1]", "contains"),
        ({"type": "array", "items": WHOLE | {"not": {"const": 1}}}, "[1]", "not"),
        (WHOLE | {"if": {"const": 1}, "then": {"const": 2}}, "1", "if"),
        (TWO | {"dependentRequired": {"a": ["b"]}}, '{"a":1}', "dependentRequired"),
        ({"oneOf": [WHOLE, {"type": "number"}]}, "1", "oneOf (as anyOf)"),
        ({"allOf": [WHOLE, {"type": "integer", "minimum": 5}]}, "1", "allOf of several"),
        ({"$defs": {"i": WHOLE}, "$ref": "#/$defs/i", "minimum": 5}, "1", "what stands beside $ref"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"a"', "minLength and maxLength beside pattern"),
        ({"properties": {"not": WHOLE | {"multipleOf": 10}}, "type": "object", "required": ["not"]}, '{"not":7}', None),
        (LISTS | {"minItems": 2}, "[1]", None),
    ],
)
def test_what_the_library_does_not_enforce_is_said(schema, breaks_it, said, capsys):
    source = json_schema(schema=schema, whitespace=0, draft=False)
    warned = capsys.readouterr().err
    assert ("does not enforce " + said in warned) if said else "does not enforce" not in warned
    xgrammar = library()
    signs = [chr(i) for i in range(32, 127)]
    tokens = xgrammar.TokenizerInfo([*signs, "<eos>"], vocab_size=96, stop_token_ids=[95])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(tokens).compile_grammar(source.grammar))
    taken = all(matcher.accept_token(signs.index(sign)) for sign in breaks_it) and matcher.accept_token(95)
    assert taken == (said is not None)


@pytest.mark.parametrize(
    ("pattern", "found"), [("^(a|b)+$", []), ("[^a$]", []), (r"\^a\$b", []), ("^a$b", ["$"]), ("(^a|b$)", ["^", "$"])]
)
def test_anchors_inside_a_pattern_are_said(pattern, found, capsys):
    regex(pattern=pattern, draft=False)
    warned = capsys.readouterr().err
    assert [sign for sign in "^$" if f"{sign} inside the pattern" in warned] == found


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[grammar\]'"):
        regex(pattern="a", draft=False)


def test_a_schema_as_a_mapping_as_text_and_as_a_file_is_one_grammar(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(json.loads(SCHEMA)))
    given = (json.loads(SCHEMA), SCHEMA, str(tmp_path / "a.json"))
    assert len({json_schema(schema=x, whitespace=0, draft=False).origin for x in given}) == 1
    assert (
        json_schema(schema=SCHEMA, whitespace=1, draft=False).origin
        != json_schema(schema=SCHEMA, whitespace=0, draft=False).origin
    )


def test_from_python():
    made = specresearch.engine(
        "target=tiny", "drafter=ngram", "grammar=regex", r"grammar.pattern=(no|yes), [0-9]{2}\$?"
    )
    assert re.fullmatch(r"(no|yes), [0-9]{2}\$?", made.generate("no, no, no").text)
    made = specresearch.engine("target=tiny", "drafter=ngram", "grammar=json_schema", f"grammar.schema={SCHEMA}",
                               "grammar.whitespace=0")  # fmt: skip
    assert json.loads(made.generate("x").text)["a"] in (True, False)
    with pytest.raises(UserError, match=r"grammar\.schema must be given"):
        specresearch.engine("target=tiny", "grammar=json_schema")
    with pytest.raises(UserError, match="grammar=jsonschema does not exist"):
        specresearch.engine("target=tiny", "grammar=jsonschema")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Call a command in this process -> what it printed; its exit status must be `code`."""

    def call(*overrides: str, command=cli, code: int = 0) -> str:
        base = (
            [] if any(o.startswith("resume=") for o in overrides) else ["target=tiny", "drafter=ngram", "tracker=none"]
        )
        monkeypatch.setattr(sys, "argv", ["specresearch", *base, *overrides])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as left:
            command.main()
        out = "".join(capsys.readouterr())
        assert left.value.code == code, out
        return out

    return call


def test_the_command_line_and_a_resumed_run(run, tmp_path):
    """From a file; the summary says that all answers are complete; a run goes on with the same grammar only."""
    schema, folder = tmp_path / "a, b.json", tmp_path / "run"
    schema.write_text(SCHEMA)
    grammar = ["grammar=json_schema", 'grammar.schema="a, b.json"', "grammar.whitespace=0"]
    out = run(*grammar, "limit=3", "max_new_tokens=40", "hydra.run.dir=run", "baseline=hf", "report=false")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["grammar"].items() >= {"kind": "json_schema", "complete": 3, "cut": 0, "off": 0}.items()
    assert summary["lossless"]["verdict"] in ("lossless", "not_exercised") and summary["lossless"]["equal"] == 3
    assert "json_schema: 3 of 3 answers complete" in out
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert all(isinstance(json.loads(line["text"])["a"], bool) for line in lines)
    for name in ("trace.jsonl", "blocks.jsonl"):  # as if it had been interrupted after two answers
        path = folder / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    run("resume=run")
    again = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert [line["output_ids"] for line in again] == [line["output_ids"] for line in lines]
    schema.write_text(SCHEMA.replace('"a"', '"b"'))
    assert "changed since" in run("resume=run", code=1)


def test_jobs_of_a_sweep_share_plain_answers_of_one_grammar_only(run, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(SCHEMA.replace('"a"', f'"{name}"'))
    run("-m", "grammar=json_schema", "grammar.schema=a.json,b.json", "grammar.whitespace=0", "hydra.sweep.dir=sweep",
        "limit=9", "max_new_tokens=4", "report=false")  # fmt: skip
    found = [json.loads((tmp_path / "sweep" / str(job) / "summary.json").read_text()) for job in range(2)]
    assert [s["lossless"]["equal"] for s in found] == [9, 9]
    assert len(list((tmp_path / "sweep" / "baseline").iterdir())) == 18


def test_certify_judges_a_log_by_the_grammar(run, tmp_path):
    """A right log passes; one answer that leaves the grammar is a violation."""
    grammar = ["grammar=regex", "grammar.pattern=(no|yes)+"]
    made = specresearch.engine("target=tiny", "drafter=ngram", *grammar, "temperature=1", "max_new_tokens=9")
    asked = {f"prompt {i}": made.parts.target.chat([{"role": "user", "content": f"prompt {i}"}]) for i in range(6)}
    lines = [{"prompt_ids": ids, "output_ids": made.generate(prompt).ids} for prompt, ids in asked.items()]
    path = tmp_path / "log.jsonl"
    for code in (0, 2):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        given = ["engine=tokens", "path=log.jsonl", *grammar, "temperature=1", f"hydra.run.dir=out{code}"]
        run(*given, command=certify, code=code)
        lines[3]["output_ids"][0] = 5


def test_masks_are_packed_as_everywhere_else():
    bits = torch.rand(3, 70) > 0.5
    assert torch.equal(unpack(pack_words(bits), 70), bits)
    logits = torch.randn(1, 3, 70)
    p = Sampler(temperature=1, top_k=5, top_p=0.9, min_p=0.01).warp(
        Sampler().process(logits, torch.zeros(1, 1).long(), torch.zeros(1).long(), allow=pack_words(bits)[None])
    )
    assert (p[0][~bits] == 0).all() and torch.allclose(p.sum(-1), torch.ones(1, 3))


def test_plain_decoding_is_constrained_from_the_first_token(target, words_grammar):
    """The token of the prefill, too: an answer of one token is the start of a word."""
    (turn,) = decode(target, PROMPTS[:1], drafter=NoDrafter(target), policy=trees()["chain"], budget=1,
                     sampler=Sampler(grammar=words_grammar))  # fmt: skip
    assert turn.finish == "length" and turn.output_ids[0] in following(target, [])


# -- the built-in target ---------------------------------------------------------------------------------------------------


def record(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 24}
SCHEMAS = {  # each with a question, and a test of the answer beyond its being JSON
    "person": (record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}), "Describe a person as JSON.",
               lambda x: {*x} == {"name", "age"} and 0 <= x["age"] <= 120),
    "choice": ({"enum": ["red", "green", "blue"]}, "What colour is the sky?", lambda x: x in ("red", "green", "blue")),
    "flag": ({"type": "boolean"}, "Is water wet?", lambda x: isinstance(x, bool)),
    "numbers": ({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 5},
                "Give some primes.", lambda x: 3 <= len(x) <= 5 and all(type(i) is int for i in x)),
    "nested": (record(at=record(x={"type": "integer", "minimum": 0, "maximum": 9}, y={"type": "boolean"})),
               "Where is it?", lambda x: type(x["at"]["x"]) is int and isinstance(x["at"]["y"], bool)),
    "either": ({"anyOf": [{"type": "null"}, record(why=SHORT)]}, "Why?", lambda x: x is None or {*x} == {"why"}),
    "strings": ({"type": "array", "items": {**SHORT, "maxLength": 8}, "minItems": 2, "maxItems": 2}, "Name two cities.",
                lambda x: len(x) == 2 and all(len(s) <= 8 for s in x)),
    "coded": (record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}), "Give me the code.",
              lambda x: re.fullmatch("[A-Z]{2}-[0-9]{3}", x["code"])),
    "constant": (record(version={"const": 3}, ok={"type": "boolean"}), "Which version?", lambda x: x["version"] == 3),
    "optional": ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["b"],
                  "additionalProperties": False}, "Say something.", lambda x: x["b"] is None and {*x} <= {"a", "b"}),
}  # fmt: skip


@pytest.mark.slow
def test_ten_schemas_on_the_built_in_target():
    """Greedy answers equal plain constrained decoding's, up to near-ties; each parses and follows its schema."""
    from specresearch.models import smollm2

    target, said = smollm2.load(), {}
    assert len(SCHEMAS) == 10
    for name, (schema, question, right) in SCHEMAS.items():
        answers = {}
        for mode in (["drafter=none"], ["drafter=eagle"], ["drafter=eagle", "grammar.draft=true"]):
            given = ["grammar=json_schema", f"grammar.schema={json.dumps(schema)}", "grammar.whitespace=1", *mode]
            made = specresearch.engine(*given, "max_new_tokens=64", target=target)
            result = made.generate(question)
            assert result.finish == "eos" and right(json.loads(result.text)), (name, result.text)
            answers[" ".join(mode)] = result.ids
            prompt = target.chat([{"role": "user", "content": question}])
            judged = TokensJudge(target, made.parts.sampler)
            judged.add({"id": name, "turn": 0, "prompt_ids": prompt, "output_ids": result.ids})
            assert not judged.violations
        plain, *others = answers.values()
        said[name] = [other == plain for other in others]
        assert all(said[name]) or judged.near_ties, name
    assert sum(map(sum, said.values())) >= 18
