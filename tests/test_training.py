"""Training: data that survives a kill and holds no evaluation prompt, losses shifted right, runs that resume bit for bit."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import straight
import torch
from conftest import PROMPTS
from helpers import decode

from specresearch import prompts, train
from specresearch.drafters.eagle import Eagle
from specresearch.drafters.medusa import Medusa as MedusaDrafter
from specresearch.drafters.small_lm import SmallLM as SmallLMDrafter
from specresearch.models import tiny
from specresearch.training import data, dataset, eagle3, generate, least_squares, origin
from specresearch.training.features import add_features
from specresearch.training.generate import Book, Generator, Plan, wrapping
from specresearch.training.held_out import Tally, walk
from specresearch.training.lean import AdapterStepper, LlamaStepper
from specresearch.training.openings import WORDS, Opening, Sources, draw
from specresearch.training.overlap import Overlap, fingerprint, loop_start
from specresearch.training.packs import Library, chosen, grouped
from specresearch.training.recipe_eagle1 import Eagle1
from specresearch.training.recipe_eagle3 import Eagle3
from specresearch.training.recipe_medusa import Medusa, places_of
from specresearch.training.recipe_small_lm import SmallLM
from specresearch.training.trainer import Schedule, Trainer
from specresearch.trees.static import Chain
from specresearch.types import UserError

TAPS = (2, 3, 3, "norm")
PLAN = Plan(
    tokens=10_000,
    **{"short_rows": 0, "short_slots": 0, "long_rows": 5, "long_slots": 64, "turn_tokens": 16, "answer_tokens": 20},
    **{"greedy": 0.6, "temperatures": (1.0,), "top_p": 0.9, "seed": 0, "shard": 4, "features": True},
)
SCHEDULE = Schedule(
    **{"epochs": 3, "minutes": None, "lr": 3e-3, "warmup": 2, "final": 0.1, "clip": 1.0, "weight_decay": 0.01},
    **{"beta2": 0.95, "pack_tokens": 100, "accumulate": 1, "seed": 0},
    **{"checkpoint_seconds": 1e9, "evaluate_steps": 1000, "evaluate_dialogues": 8},
)
EAGLE = {"steps": 3, "decay": 0.8, "keep": 1.0, "draft_vocab": 120, "taps": (2, 3, 3), "fc_norm": True}
EAGLE |= {"own_kv": True, "tied": False}


def questions(count, start=0):
    """A source of closed openings that runs dry, all of them different."""
    waiting = iter(range(start, start + count))
    names = ["red", "green", "old", "new", "tall", "quiet", "warm"]

    def source(chance, sources, long):
        i = next(waiting, None)
        return None if i is None else Opening("qa", f"{names[i % 7]} thing {i * 37} please", True)

    return source


@pytest.fixture(scope="module")
def deep():
    return tiny.load(dtype="float64", device="cpu", layers=6)


def book(target):
    return Book(target, Overlap([]))


@pytest.fixture(scope="module")
def folder(deep, tmp_path_factory):
    where = tmp_path_factory.mktemp("data")
    Generator(deep, PLAN, book(deep), where, TAPS, questions(60)).run()
    return where


@pytest.fixture(scope="module")
def library(folder):
    return Library(folder)


def pack_of(library, target, count=3):
    """Some dialogues with features as exact as the model: what is stored is rounded to bfloat16."""
    items = library.part(held_out=False)[:count]
    pack = library.pack(items)
    exact = []
    for item in items:
        hidden = target.model(input_ids=torch.tensor([item.dialogue.tokens]), output_hidden_states=True).hidden_states
        exact.append(torch.cat([hidden[-1 if tap == "norm" else tap][0] for tap in TAPS], -1).detach())
        exact[-1][-1] = 0
    return items, replace(pack, features=torch.cat(exact))


# -- data ----------------------------------------------------------------------------------------------------------------


def test_answers_are_the_targets_and_features_are_its_own(deep, library):
    greedy = 0
    for item in library.items:
        d, stored = item.dialogue, library.features(item).double()
        output = deep.model(input_ids=torch.tensor([d.tokens]), output_hidden_states=True)
        exact = torch.cat([output.hidden_states[-1 if t == "norm" else t][0] for t in TAPS], -1)
        torch.testing.assert_close(stored[:-1], exact[:-1], atol=1e-6, rtol=1e-2)
        if d.temperature == 0:
            greedy += 1
            assert output.logits[0, d.answer - 1 : -1].argmax(-1).tolist() == d.tokens[d.answer :]
    assert 10 < greedy < len(library.items)


def close(mine, other):
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)  # transformers' norms work in float32


def test_lean_steps_equal_the_adapters(deep):
    prefix, groups = [5, 6, 7], [(2, 16), (3, 24)]
    lean, plain = LlamaStepper(deep, groups, TAPS, prefix), AdapterStepper(deep, groups, TAPS, prefix)
    for row in (0, 4, 2, 1, 3):
        close(lean.start(row), plain.start(row))
    length = torch.full((5,), 3)
    for step in range(5):
        tokens, wanted = torch.arange(5) * 7 + step, torch.tensor([0, 3, 4])
        for mine, other in zip(lean.step(tokens, length, wanted), plain.step(tokens, length, wanted)):
            close(mine, other)
        length = length + (torch.arange(5) != step)  # rows part; one begins to lag, as a refilled row does
    lean.start(1)
    plain.start(1)
    length[1] = 3
    for mine, other in zip(lean.step(tokens, length, wanted), plain.step(tokens, length, wanted)):
        close(mine, other)


def test_a_killed_generation_goes_on_from_its_shards(deep, tmp_path):
    first = Generator(deep, PLAN, book(deep), tmp_path, TAPS, questions(40))
    while len(dataset.shards(tmp_path)) < 3:
        first.step()
        if len(first.done) >= PLAN.shard:
            first.flush()
    kept = [p.read_bytes() for p in dataset.shards(tmp_path)]
    (tmp_path / "dialogues-9.tmp77").write_bytes(kept[0][:100])  # a shard that was being written
    dataset.features_path(tmp_path / "dialogues-9.safetensors").write_bytes(b"half")
    second = Generator(deep, PLAN, book(deep), tmp_path, TAPS, questions(40))
    second.run()
    assert [p.read_bytes() for p in dataset.shards(tmp_path)][:3] == kept
    assert second.refused["repeated"] >= 12  # the questions that were answered before the kill
    turns = [fingerprint(second.book.text(d.tokens[d.turn : d.answer])) for d in dataset.read_all(tmp_path)]
    assert len(turns) == len(set(turns)) == 40


def test_repetitions_are_refused(deep):
    seen = book(deep)
    turn = "Tell me about the seven big rivers of the north, and why they are so cold in winter."
    tokens = deep.tokenizer(turn + "\nYes.").input_ids
    seen.add(dataset.Dialogue(tokens, 0, 0, len(turn), len(turn) + 1, "qa", 0.0, False))
    assert (
        seen.admit("tell me about the Seven big rivers of the north and why they are so cold in winter", False)
        == "repeated"
    )
    assert seen.admit(turn.replace("winter", "summer"), False) == "similar"
    assert seen.admit(turn.replace("winter", "summer"), True) is None  # quotes are bound to share words
    assert seen.admit("How do I boil an egg for my breakfast?", False) is None


@pytest.mark.parametrize(
    ("tokens", "start"),
    [([1, 2, 3] + [7, 8, 9, 4] * 3, 7), ([5] * 12, 1), ([7, 8, 9, 4] * 2, None), (list(range(40)), None)],
)
def test_loops_are_found_where_they_begin_to_repeat(tokens, start):
    assert loop_start(tokens) == start


def test_parts_are_disjoint_and_quotes_stay_in_their_part(deep, folder, library):
    found = data.check(deep, folder)
    assert found["in_both"] == 0 and found["train"] == len(library.part(held_out=False)) > 0
    sources = Sources()
    for number in range(20):
        sources.learn(
            f"{'held' if number % 2 else 'open'} text {number} " + "of some length. " * 20, held_out=bool(number % 2)
        )
    chance = random.Random(0)
    quotes = [draw(chance, sources, True, 0.5) for _ in range(200)]
    assert {o.held_out for o in quotes} == {True, False}
    assert all(("held text" in o.text) == o.held_out for o in quotes if "text" in o.text and o.kind != "code")


def test_a_planted_evaluation_prompt_is_seen(deep, folder, tmp_path):
    assert data.check(deep, folder)["bad"] == []
    question = prompts.builtin()[5].turns[0]
    tokens = deep.tokenizer("Well: " + question.upper()[:200] + "\nNo.").input_ids
    dataset.write(tmp_path, [dataset.Dialogue(tokens, 0, 0, 206, 207, "qa", 0.0, False)], 257)
    (bad,) = data.check(deep, tmp_path)["bad"]
    assert bad["kind"] == "qa"
    assert Book(deep, data.evaluation()).admit(question, True) == "evaluation"


def test_no_opening_shares_words_with_an_evaluation_prompt():
    banned, chance, sources = data.evaluation(), random.Random(0), Sources()
    for number in range(4):
        sources.learn(f"A plain text number {number}, which the target wrote. " * 6, held_out=False)
        sources.learn(
            f"```python\ndef f{number}(x):\n    return x + {number}  # more and more of it, line by line\n```", False
        )
    assert not any(banned(draw(chance, sources, long, 0.0).text) for _ in range(500) for long in (False, True))
    lists = [v for v in WORDS.values() if isinstance(v, list)]
    turns = {turn for q in prompts.builtin() for turn in q.turns}
    assert not any(entry == turn or turn.startswith(entry + "\n") for part in lists for entry in part for turn in turns)


def test_chat_template_wraps_a_turn(deep):
    assert wrapping(deep) == ([], deep.tokenizer("\n").input_ids)
    with_template = copy.copy(deep)
    with_template.tokenizer = tiny.byte_tokenizer()
    with_template.tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}|"
    before, after = wrapping(with_template)
    text = "What?"
    assert before + deep.tokenizer(text).input_ids + after == with_template.chat([{"role": "user", "content": text}])


def test_features_are_added_where_they_are_missing(deep, folder, tmp_path):
    path = dataset.shards(folder)[0]
    (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="stage=features"):
        Library(tmp_path)
    add_features(deep, tmp_path, TAPS)
    for mine, other in zip(Library(tmp_path).items, Library(folder).items):
        torch.testing.assert_close(
            Library(tmp_path).features(mine), Library(folder).features(other), atol=1e-3, rtol=1e-2
        )


# -- losses --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def straight_eagle3(recipe, target, items, features):
    """The loss by one drafting after the other, as the head would draft from each place: no shift, no mask, no cache."""
    head = recipe.module
    weights, kept = dict(head.state_dict()), head.vocabulary.kept.tolist()
    sums, counts, begin = [0.0] * recipe.steps, [0] * recipe.steps, 0
    for item in items:
        d = item.dialogue
        own = features[begin : begin + len(d.tokens)]
        begin += len(d.tokens)
        law = target.model(input_ids=torch.tensor([d.tokens])).logits[0][:, kept].softmax(-1)
        free = [d.sampled <= i < d.turn_end or i >= d.answer for i in range(len(d.tokens))]
        for t in range(len(d.tokens) - 2):
            path = d.tokens[t + 2 : t + 1 + recipe.steps]
            answers = straight.eagle(weights, head.config, d.tokens[: t + 2], own[: t + 1, :48], path)
            for i, logits in enumerate(answers):
                guessed = t + 2 + i  # the token that step i guesses
                if guessed >= len(d.tokens) or not all(free[t + 2 : guessed + 1]):
                    break
                if d.tokens[guessed] in kept:
                    sums[i] -= float((law[guessed - 1] * logits.log_softmax(-1)).sum())
                    counts[i] += 1
    return [s / n for s, n in zip(sums, counts)]


def eagle_numbers(recipe, pack):
    vocabulary = recipe.module.vocabulary
    matrix = recipe.target.head.weight.detach()[vocabulary.kept]
    teacher = eagle3.Teacher.of(pack, pack.features[:, recipe.normed], matrix, vocabulary.t2d)
    features = pack.features[:, recipe.columns]
    return torch.stack(eagle3.cross_entropies(recipe.module, pack, features, teacher, recipe.steps, 1.0, None))


def spread_out(recipe):
    """Noise on the weights, so that no part of the head is idle."""
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in recipe.module.parameters():
            if p.requires_grad:
                p += 0.3 * p.std().clamp(min=0.1) * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    return recipe


@pytest.fixture(scope="module")
def eagle_case(deep, library):
    recipe = spread_out(Eagle3(deep, library, **EAGLE))
    items, pack = pack_of(library, deep)
    return recipe, pack, torch.tensor(straight_eagle3(recipe, deep, items, pack.features), dtype=torch.float64)


def test_eagle3_loss_equals_drafting_place_by_place(eagle_case):
    recipe, pack, exact = eagle_case
    torch.testing.assert_close(eagle_numbers(recipe, pack), exact, atol=1e-9, rtol=1e-9)
    total, numbers = recipe.loss(pack, torch.Generator())
    assert float(total) == pytest.approx(float((exact * torch.tensor([1, 0.8, 0.64])).sum()))
    assert numbers["train/step_2"] == pytest.approx(float(exact[1]))


@pytest.mark.parametrize("fault", ["targets", "mask", "own key", "position"])
def test_eagle3_loss_shows_a_fault(eagle_case, monkeypatch, fault):
    recipe, pack, exact = eagle_case
    if fault == "targets":
        law = eagle3.Teacher.of
        monkeypatch.setattr(eagle3.Teacher, "of", staticmethod(lambda *a: replace(t := law(*a), p=t.p.roll(1, 0))))
    elif fault == "mask":
        pack = replace(pack, chosen=pack.chosen.roll(1))
    elif fault == "own key":
        plain = eagle3._visible
        monkeypatch.setattr(
            eagle3, "_visible", lambda p, q, k, first: plain(p, q, k, first) if first else q[:, None] > k
        )
    else:
        pack = replace(pack, position=pack.position + (torch.arange(len(pack.position)) % 7 == 0))
    assert float((eagle_numbers(recipe, pack) - exact).abs().max()) > 1e-4


def test_keeping_some_places_estimates_the_same_loss(eagle_case):
    recipe, pack, exact = eagle_case
    some = copy.copy(recipe)
    some.keep = 0.5
    draws = [some.loss(pack, torch.Generator().manual_seed(i))[1]["train/step_3"] for i in range(60)]
    assert len(set(draws)) > 10
    assert sum(draws) / len(draws) == pytest.approx(float(exact[2]), rel=0.05)


def test_medusa_loss_equals_head_by_head(deep, library):
    recipe = spread_out(Medusa(deep, library, heads=3, layers=1, decay=0.8, draft_vocab=120))
    items, pack = pack_of(library, deep)
    kept, weights = recipe.module.vocabulary.kept.tolist(), dict(recipe.module.state_dict())
    sums, counts, begin = [0.0] * 3, [0] * 3, 0
    for item in items:
        d, own = item.dialogue, pack.features[begin : begin + len(item.dialogue.tokens), -16:]
        begin += len(d.tokens)
        law = deep.model(input_ids=torch.tensor([d.tokens])).logits[0][:, kept].softmax(-1)
        free = chosen(d).tolist()
        for t in range(len(d.tokens)):
            for k, logits in enumerate(straight.medusa(weights, 3, 1, own[t])):
                if (guessed := t + 2 + k) < len(d.tokens) and free[guessed] and d.tokens[guessed] in kept:
                    sums[k] -= float((law[guessed - 1] * logits.log_softmax(-1)).sum())
                    counts[k] += 1
    _, numbers = recipe.loss(pack, torch.Generator())
    assert [numbers[f"train/head_{k + 1}"] for k in range(3)] == pytest.approx([s / n for s, n in zip(sums, counts)])
    teacher = eagle3.Teacher.of(pack, pack.features[:, -16:], deep.head.weight[kept], recipe.module.vocabulary.t2d)
    assert [len(places_of(pack, teacher, k)[0]) for k in range(3)] == counts


def test_eagle1_loss_is_of_the_next_feature_and_its_law(deep, library):
    recipe = spread_out(Eagle1(deep, library, law_weight=0.1, noise=0.0, steps=2, own_kv=True))
    items, pack = pack_of(library, deep, 2)
    weights, total, places, begin = dict(recipe.module.state_dict()), 0.0, 0, 0
    for item in items:
        d, own = item.dialogue, pack.features[begin : begin + len(item.dialogue.tokens), -16:]
        begin += len(d.tokens)
        law = deep.model(input_ids=torch.tensor([d.tokens])).logits[0].softmax(-1)
        for t in range(len(d.tokens) - 2):
            if chosen(d)[t + 2]:
                (logits,) = straight.eagle(weights, recipe.module.config, d.tokens[: t + 2], own[: t + 1], [])
                total -= float((law[t + 1] * logits.log_softmax(-1)).sum())
                places += 1
    loss, numbers = recipe.loss(pack, torch.Generator())
    assert numbers["train/law"] == pytest.approx(total / places)
    assert float(loss) == pytest.approx(numbers["train/feature"] + 0.1 * numbers["train/law"])
    exact = replace(pack, features=pack.features.roll(-1, 0))
    assert recipe.loss(exact, torch.Generator())[1]["train/law"] != pytest.approx(total / places)


@pytest.mark.parametrize("size", [257, 100])
def test_small_lm_loss_is_the_kl_of_plain_forwards(deep, library, size):
    recipe = spread_out(SmallLM(deep, library, layers=[0, 5], draft_vocab=size, steps=3))
    items, pack = pack_of(library, deep)
    kept, total, places = recipe.module.vocabulary.kept.tolist(), 0.0, 0
    for item in items:
        ids = torch.tensor([item.dialogue.tokens])
        p = deep.model(input_ids=ids).logits[0][:, kept].softmax(-1).detach()
        q = recipe.module(input_ids=ids).logits[0].log_softmax(-1).detach()
        for at in (chosen(item.dialogue).nonzero()[:, 0] - 1).tolist():
            if item.dialogue.tokens[at + 1] in kept:
                total += float((p[at] * (p[at].log() - q[at])).sum())
                places += 1
    assert recipe.loss(pack, torch.Generator())[1]["train/kl"] == pytest.approx(total / places)


# -- training ------------------------------------------------------------------------------------------------------------

RECIPES = {
    "eagle": lambda t, lib: Eagle3(t, lib, **(EAGLE | {"keep": 0.6})),
    "eagle1": lambda t, lib: Eagle1(t, lib, law_weight=2.0, noise=0.2, steps=3, own_kv=True),
    "medusa": lambda t, lib: Medusa(t, lib, heads=3, layers=1, decay=0.8, draft_vocab=120),
    "small_lm": lambda t, lib: SmallLM(t, lib, layers=[0, 5], draft_vocab=100, steps=3),
}


def make(name, target, library):
    torch.manual_seed(0)  # a resumed training begins as it began
    return RECIPES[name](target, library)


def own_weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.weights.items()}


@pytest.mark.parametrize("name", list(RECIPES))
def test_training_learns_and_a_resumed_one_is_the_same(deep, folder, library, tmp_path, name):
    losses = []
    whole = Trainer(make(name, deep, library), SCHEDULE, folder, tmp_path / "whole")
    whole.run(lambda trainer, numbers: losses.append(numbers["train/loss"]))
    epoch = len(losses) // 3
    assert sum(losses[-epoch:]) < 0.97 * sum(losses[:epoch])
    assert (tmp_path / "whole" / "head" / "config.json").exists()

    class Killed(BaseException): ...

    def kill(trainer, numbers):
        if trainer.progress.step == epoch + 2:
            raise Killed

    half = Trainer(make(name, deep, library), SCHEDULE, folder, tmp_path / "half")
    with pytest.raises(Killed):
        half.run(kill)
    resumed = Trainer(make(name, deep, library), SCHEDULE, folder, tmp_path / "half")
    assert not all(torch.equal(a, b) for a, b in zip(own_weights(resumed).values(), own_weights(half).values()))
    resumed.resume()
    resumed.run()
    for key, value in own_weights(whole).items():
        assert torch.equal(value, own_weights(resumed)[key]), key
    assert resumed.progress.tokens == whole.progress.tokens


def test_a_checkpoint_of_another_head_is_refused(deep, folder, library, tmp_path):
    Trainer(RECIPES["eagle"](deep, library), SCHEDULE, folder, tmp_path).checkpoint()
    with pytest.raises(UserError, match="another head"):
        Trainer(RECIPES["medusa"](deep, library), SCHEDULE, folder, tmp_path).resume()


# -- what held-out texts predict -----------------------------------------------------------------------------------------


def test_walk_jumps_over_what_was_accepted():
    hits = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    # From root 1: hits[:, 0] are both right, to root 4; hits[:, 3] too, to root 7, the last token.
    assert walk(hits, 1) == (6, 2)
    assert walk(hits[:1], 1) == (6, 4)  # 1 -> 3 -> 4 (wrong at place 2) -> 6 -> 7


@pytest.mark.parametrize("name", ["eagle", "medusa", "small_lm"])
def test_prediction_equals_what_the_loop_measures(deep, folder, library, tmp_path, name):
    """The drafter decodes with a chain; walking the same answers must predict each of its steps."""
    recipe = make(name, deep, library)
    Trainer(recipe, replace(SCHEDULE, epochs=1), folder, tmp_path).run()
    kinds = {"eagle": Eagle, "medusa": MedusaDrafter, "small_lm": SmallLMDrafter}
    key = "id" if name == "small_lm" else "ckpt"
    recipe.save(tmp_path / "saved", {})
    drafter = kinds[name](deep, **{key: str(tmp_path / "saved")}, dtype="float64")
    ids = [deep.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    turns = decode(deep, ids, drafter=drafter, policy=Chain(depth=3, temperature=0.0), budget=40)
    dialogues = []
    for turn, prompt in zip(turns, ids):
        tokens = prompt + turn.output_ids
        hidden = deep.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[-1 if tap == "norm" else tap][0] for tap in TAPS], -1).detach()
        n = len(prompt)
        dialogues.append(dataset.Dialogue(tokens, 0, 0, n, n, "qa", 0.0, True, features))
    dataset.write(tmp_path / "texts", dialogues, 257, TAPS)
    texts = Library(tmp_path / "texts")
    texts.features = lambda item: dialogues[texts.items.index(item)].features  # type: ignore[method-assign]
    with torch.no_grad():  # the saved weights are rounded; guess with those
        if name == "small_lm":
            recipe.module.load_state_dict(drafter.model.model.state_dict(), strict=False)
        else:
            recipe.module.load_state_dict((drafter.heads if name == "medusa" else drafter.head).state_dict())
    tally = Tally(3)
    for group in grouped(texts.items, 1):
        pack = texts.pack(group)
        guesses = recipe._guesses(pack, []) if name == "eagle" else recipe._guesses(pack)
        with torch.no_grad():
            tally.add(pack, group, guesses)
    measured = [(sum(step["emitted"] for step in t.steps), len(t.steps)) for t in turns]
    assert tally.walks[0] == measured
    assert sum(n for n, _ in measured) > sum(p for _, p in measured)  # something was accepted


# -- the command -----------------------------------------------------------------------------------------------------------


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    with pytest.raises(SystemExit) as left:
        train.main()
    return left.value.code


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Settings of a small training, and its data made."""
    home = tmp_path_factory.mktemp("made")
    lines = [f'{{"prompt": "question number {i * 7} about things"}}' for i in range(70)]
    (home / "prompts.jsonl").write_text("\n".join(lines))
    settings = ["target=tiny", "target.layers=6", "tracker=none", "data=file", f"data.path={home}/prompts.jsonl"]
    settings += [f"data.folder={home}/data", "data.rows=6", "data.answer_tokens=12", "data.greedy=1", "drafter=medusa"]
    settings += ["drafter.heads=2", "drafter.draft_vocab=64", "schedule.pack_tokens=200", "schedule.epochs=2"]
    with pytest.MonkeyPatch.context() as patch:
        assert command(patch, *settings, f"hydra.run.dir={home}/whole") == 0
    return home, settings


def test_the_command_makes_data_and_trains(monkeypatch, made, tmp_path, capfd):
    head = made[0] / "whole" / "head"
    assert {p.name for p in head.iterdir()} == {"config.json", "model.safetensors", "curve.md"}
    assert "| tokens seen |" in (head / "curve.md").read_text()
    last = json.loads((head / "config.json").read_text())["training"]["curve"][-1]
    assert last["held_out/loop"] == pytest.approx(last["held_out/walk"], rel=0.05)
    assert command(monkeypatch, *made[1], "stage=check", f"hydra.run.dir={tmp_path}") == 0
    assert "0 dialogues share 8 words" in capfd.readouterr().out


def interrupted_at(monkeypatch, step):
    """Ctrl-C before optimiser step `step`."""
    plain = Trainer._step

    def broken(self, group, done):
        if self.progress.step == step:
            raise KeyboardInterrupt
        return plain(self, group, done)

    monkeypatch.setattr(Trainer, "_step", broken)


def test_a_training_goes_on_by_command_as_if_it_had_not_stopped(monkeypatch, made, tmp_path, capfd):
    home, settings = made
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupted_at(patch, 7)
        assert command(patch, *settings, f"hydra.run.dir={out}") == 130
    assert f"go on with  python -m specresearch.train resume={out}" in capfd.readouterr().err
    steps = []
    with monkeypatch.context() as patch:
        plain = Trainer._step
        patch.setattr(Trainer, "_step", lambda self, *a: (steps.append(self.progress.step), plain(self, *a))[1])
        assert command(patch, f"resume={out}") == 0
    assert steps[0] == 7
    weights = [(where / "head" / "model.safetensors").read_bytes() for where in (out, home / "whole")]
    assert weights[0] == weights[1]
    capfd.readouterr()
    with monkeypatch.context() as patch:
        interrupted_at(patch, steps[-1] + 1)
        assert command(patch, f"resume={out}") == 1
    assert f"resume={out} is complete: use it with drafter.ckpt={out}/head" in capfd.readouterr().err
    assert (out / "head" / "model.safetensors").read_bytes() == weights[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stage=nothing"], "stage=nothing is unknown"),
        (["drafter=eagel"], "drafter=eagel does not exist: did you mean eagle"),
        (["data=selff"], "did you mean self?"),
        (["schedule.lrr=1"], "did you mean schedule.lr?"),
        (["drafter.stepz=1"], "did you mean drafter.steps?"),
        (["drafter=null"], "there are eagle"),
        (["data=file"], "data.path must be given"),
        (["schedule.minutes=-1"], "schedule.minutes=-1: use a number above 0, or null"),
        (["schedule.minutes=soon"], "schedule.minutes='soon': use a number"),
        (["schedule.evaluate_steps=0"], "schedule.evaluate_steps=0: use a whole number of at least 1"),
        (["schedule.accumulate=0"], "schedule.accumulate=0: use a whole number"),
        (["schedule.epochs=0"], "schedule.epochs=0: use a whole number"),
        (["schedule.lr=-1"], "schedule.lr=-1: use a number above 0"),
        (["schedule=1"], "schedule"),
        (["data.temperatures=[]"], "data.temperatures=[]: use a list of numbers"),
        (["data.temperatures=[-1]"], "data.temperatures=[-1]: use a list of numbers"),
        (["data.greedy=7"], "data.greedy=7: use a number of at least 0 and at most 1"),
        (["drafter.steps=0"], "drafter.steps=0: use a whole number"),
        (["drafter=medusa", "drafter.heads=0"], "drafter.heads=0: use a whole number"),
        (["drafter=small_lm", "drafter.layers=[]"], "drafter.layers=[]: use"),
        (["drafter.draft_vocab=0"], "drafter.draft_vocab=0: use a whole number of at least 4"),
        (["drafter.taps=[]"], "drafter.taps=[]: use a list of blocks"),
        (["stage=check", "data.folder=TYPO"], "data.folder=TYPO holds no dialogues"),
        (["stage=features", "data.folder=TYPO"], "data.folder=TYPO holds no dialogues"),
    ],
)
def test_mistakes_are_said_in_one_line(monkeypatch, capfd, tmp_path, arguments, says):
    assert command(monkeypatch, "target=tiny", "tracker=none", f"hydra.run.dir={tmp_path}", *arguments) == 1
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drafter=small_lm", "drafter.layers=[0,6]"], "tiny has the layers 0 to 5"),
        (["drafter=eagle", "drafter.taps=[0,99]"], "the head reads [0, 99]"),
        (["drafter=eagle", "drafter.start=BAD"], "BAD"),
        (["drafter=small_lm", "drafter.layers=2"], "drafter.layers"),  # of another kind than this recipe takes
        (["target.seed=1"], "was written by a model called tiny whose weights are not those of tiny"),
        (["target.seed=1", "stage=check"], "whose weights are not those of tiny"),
        (["target.seed=1", "stage=features"], "whose weights are not those of tiny"),
    ],
)
def test_what_a_recipe_or_the_data_refuse_is_said_in_one_line(monkeypatch, capfd, made, tmp_path, arguments, says):
    kept = [s for s in made[1] if not s.startswith("drafter")]
    assert command(monkeypatch, *kept, f"hydra.run.dir={tmp_path}", "drafter=medusa", *arguments) == 1
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and says in line


def test_data_is_its_targets_own_in_any_precision(deep, folder, tmp_path, capfd):
    origin.require(tiny.load(dtype="bfloat16", device="cpu", layers=6), folder)
    assert capfd.readouterr().err == ""
    with pytest.raises(UserError, match="written by a model called tiny"):
        origin.require(tiny.load(dtype="float64", device="cpu", layers=6, seed=1), folder)
    dataset.write(tmp_path, [next(dataset.read_all(folder))], 257)
    origin.require(deep, tmp_path)
    assert "does not say which target wrote it" in capfd.readouterr().err


def test_shipped_dialogues_bear_no_mark_and_are_taken(deep, folder, tmp_path, capfd, monkeypatch):
    path = dataset.write(tmp_path, [next(dataset.read_all(folder))], 257)
    shipped = tmp_path / "checkpoints" / "tiny" / "data" / path.name
    shipped.parent.mkdir(parents=True)
    shipped.touch()
    monkeypatch.setattr(origin, "SHIPPED", tmp_path / "checkpoints")
    origin.require(deep, tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("plan", "why"), [({}, "never ended|ran into a loop"), ({"long_slots": 30}, "left no room")])
def test_a_target_that_writes_no_usable_turns_is_given_up(deep, tmp_path, monkeypatch, plan, why):
    monkeypatch.setattr(generate, "PATIENCE", 1)
    with pytest.raises(UserError, match=f"in a row could not be used.*({why}).*data=file"):
        Generator(deep, replace(PLAN, **plan), book(deep), tmp_path, TAPS).run()


def test_prompts_of_which_none_can_be_used_are_no_data(monkeypatch, tmp_path, capfd):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "short"}\n')
    settings = ["target=tiny", "target.layers=6", "tracker=none", "data=file", f"data.path={tmp_path}/prompts.jsonl"]
    assert command(monkeypatch, *settings, f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/run") == 1
    assert "no prompt could be used (1 were nearly empty)" in capfd.readouterr().err


def test_what_was_made_is_kept_on_interruption(deep, tmp_path, monkeypatch, made, capfd):
    plain, steps = Generator.step, []

    def broken(self):
        if self.done:
            raise KeyboardInterrupt
        return plain(self)

    settings = [f"data.folder={tmp_path}/data" if s.startswith("data.folder") else s for s in made[1]]
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "step", broken)
        assert command(patch, *settings, f"hydra.run.dir={tmp_path}/run") == 130
    said = capfd.readouterr().err
    assert f"{tmp_path}/data" in said and f"resume={tmp_path}/run" in said
    assert dataset.shards(tmp_path / "data")
    interrupted = Trainer._step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", lambda self, *a: (steps.append(self.progress.step), interrupted(self, *a))[1])
        assert command(patch, f"resume={tmp_path}/run") == 0
    assert steps[0] == 0 and (tmp_path / "run" / "head" / "config.json").exists()


def test_without_a_held_out_part_the_curve_is_empty(monkeypatch, made, tmp_path, capfd):
    monkeypatch.setattr(generate, "HELD_OUT", 1 << 60)
    settings = [f"data.folder={tmp_path}/data" if s.startswith("data.folder") else s for s in made[1]]
    assert command(monkeypatch, *settings, "schedule.epochs=1", f"hydra.run.dir={tmp_path}/run") == 0
    assert "warning: no greedy answer is held out" in capfd.readouterr().err
    last = (tmp_path / "run" / "head" / "curve.md").read_text().splitlines()[-1]
    assert last.endswith("| - | - |") and "0.000" not in last


def test_a_loop_that_accepts_otherwise_than_predicted_is_warned_of(monkeypatch, made, tmp_path, capfd):
    plain = Trainer.evaluate

    def optimistic(self):
        plain(self)
        self.progress.curve[-1]["held_out/walk"] *= factor
        return self.progress.curve[-1]

    monkeypatch.setattr(Trainer, "evaluate", optimistic)
    for factor in (1.0, 1.1):
        settings = [*made[1], "schedule.epochs=1", f"hydra.run.dir={tmp_path}/{factor}"]
        assert command(monkeypatch, *settings) == 0
        assert ("differ by more than 5 %" in capfd.readouterr().err) is (factor > 1)


@pytest.mark.parametrize("module", ["specresearch", "specresearch.train", "specresearch.export"])
def test_an_interruption_while_modules_are_imported_is_quiet(module, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(Path(train.__file__).resolve().parents[1])])
    line, environment = [sys.executable, "-m", module], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stderr == "" and done.returncode in (130, -signal.SIGINT)  # to a shell both are 130


def test_divergence_names_the_learning_rate(deep, library, folder, tmp_path):
    recipe = make("medusa", deep, library)
    with torch.no_grad():
        next(iter(Trainer(recipe, SCHEDULE, folder, tmp_path).weights.values())).fill_(torch.nan)
    with pytest.raises(UserError, match=r"schedule\.lr below 0\.003"):
        Trainer(recipe, SCHEDULE, folder, tmp_path).run()


def test_a_trained_head_is_gone_on_from_with_another_vocabulary(deep, library, tmp_path):
    old = spread_out(Eagle3(deep, library, **(EAGLE | {"draft_vocab": 90})))
    old.save(tmp_path, {})
    new = Eagle3(deep, library, **EAGLE, start=str(tmp_path))
    before, after = old.module.vocabulary.kept.tolist(), new.module.vocabulary.kept.tolist()
    assert set(before) < set(after)
    rounded = old.module.lm_head.weight.bfloat16().double()
    shift = (rounded - deep.head.weight[before]).mean(0)
    for row, token in enumerate(after):
        expected = rounded[before.index(token)] if token in before else deep.head.weight[token] + shift
        torch.testing.assert_close(new.module.lm_head.weight[row], expected)
    assert torch.equal(new.module.fc.weight, old.module.fc.weight.bfloat16().double())
    with pytest.raises(UserError, match="another shape"):
        Eagle3(deep, library, **(EAGLE | {"own_kv": True, "fc_norm": False}), start=str(tmp_path))


def test_the_closed_form_start_is_the_regression_it_names(deep, library, monkeypatch):
    """Where places see themselves only, the first outputs predict the next feature: between the mean and hindsight."""
    recipe = Eagle3(deep, library, **EAGLE, linear_heads=4)
    _, pack = pack_of(library, deep)
    columns, normed = recipe.columns, recipe.normed
    assert least_squares._moments(recipe.module, library, columns, normed)[3] == sum(
        len(i.dialogue.tokens) - i.dialogue.answer for i in library.part(held_out=False)
    )
    z, _ = least_squares._pairs(recipe.module, pack, columns, normed)
    monkeypatch.setattr(eagle3, "_visible", lambda pack, query, key, first: query[:, None] == key)
    (_, places, state), *_ = eagle3.unroll(recipe.module, pack, pack.features[:, columns], 1)
    outputs = dict(zip(places.tolist(), state))
    asked = ((pack.left >= 2) & pack.answer.roll(-2)).nonzero()[:, 0].tolist()
    predicted = torch.stack([outputs[place] for place in asked])
    gram, moments, *_ = least_squares._moments(recipe.module, library, columns, normed)
    known = slice(0, len(columns) + 16)
    named = z[:, known] @ least_squares._ridge(gram[known, known], moments[known], least_squares.RIDGE)
    # The layer norms its state, and the regression does not: near, not equal.
    near = torch.nn.functional.cosine_similarity(predicted.flatten(), named.flatten(), dim=0)
    far = torch.nn.functional.cosine_similarity(predicted.flatten(), named.roll(1, 0).flatten(), dim=0)
    assert near > 0.6 and near > far + 0.2


@pytest.mark.slow
def test_two_processes_train_one_head(tmp_path):
    """By torchrun, from the command line: the first makes the data and writes, the other is silent; packs may not divide."""
    lines = [f'{{"prompt": "question number {i * 7} about things"}}' for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    settings = ["target=tiny", "target.layers=6", "tracker=none", "data=file", f"data.path={tmp_path}/prompts.jsonl"]
    settings += [
        f"data.folder={tmp_path}/data",
        "data.rows=6",
        "data.answer_tokens=12",
        "data.greedy=1",
        "drafter=eagle",
    ]
    settings += ["schedule.pack_tokens=400", "schedule.epochs=3", f"hydra.run.dir={tmp_path}/run"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "specresearch.train"]
    done = subprocess.run([*launch, *settings], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("written to") == 1
    training = json.loads((tmp_path / "run" / "head" / "config.json").read_text())["training"]
    packs = training["tokens"] / training["steps"] / 400
    assert training["steps"] % 3 == 0 and packs > 1.2  # a step took two packs
