"""Passes recorded once and replayed: same results for every tree, length and cache. No GPU is needed: a stand-in for the
recording repeats the same operators on the same buffers, and nothing in the work may ask the host, which a GPU would refuse."""

import warnings

import pytest
import torch
from conftest import PROMPTS
from helpers import decode, trees
from test_fast import build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specresearch.drafters.small_lm import SmallLM
from specresearch.kernels.mask import pack_words
from specresearch.models import tiny
from specresearch.models.fast import FastForward, View
from specresearch.models.graphs import Graphs
from specresearch.models.hf import HFModel


class Recorder:
    """Keeps the operators of the work with the buffers that they touched, and no line of Python, as a graph does."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, work, rewind):
        self.recorded += 1
        with Tape() as tape:
            outputs = work()

        def replay():
            self.replayed += 1
            for func, args, kwargs, result in tape.calls:
                for old, new in zip(tensors(result), tensors(func(*args, **kwargs))):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay, outputs


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def tensors(result):
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


class Watch(TorchDispatchMode):
    """Names of what waits for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in self.WAITS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Recorded(HFModel):
    """As on a GPU: the mask stays packed, and passes over trees are recorded."""

    def _on_kernel(self):
        return True

    def _choose(self, fast):
        self.recorder = Recorder()
        self.fast = Graphs(FastForward(self.model, self.blocks, self.head), self.recorder)
        self._require_exact()


def adapt(kind, how=Recorded):
    return how(build(kind), tiny.byte_tokenizer(), "model-x")


@torch.inference_mode()
def tree_pass(model, length, parent, taps=(0, 2, "norm")):
    """A prompt of `length` [2] tokens, then a tree given by its parents [q] -> logits, features"""
    ids = (torch.arange(2 * int(max(length))).view(2, -1) * 7 + 3) % 251
    length, parent = torch.tensor(length), torch.tensor(parent)
    mask = torch.eye(len(parent), dtype=torch.bool)
    for node in range(1, len(parent)):
        mask[node] |= mask[parent[node]]
    model.reserve(2, 24, 8)
    model.extend([0, 1], ids, length, ())
    tokens = (torch.arange(len(parent)) * 11 + 5).expand(2, -1)
    place = length[:, None] + mask.sum(1) - 1
    return model.run(tokens, place, length, mask.expand(2, -1, -1), int(max(length)), taps=taps)


TREES = ([-1], [-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_length_and_tree_of_a_shape_is_served_by_one_record(kind):
    recorded, plain = adapt(kind), adapt(kind, HFModel)
    before, held = recorded.recorder.recorded, []
    for length in ([5, 3], [9, 9], [1, 12]):
        for parent in TREES:
            ours, theirs = tree_pass(recorded, length, parent), tree_pass(plain, length, parent)
            held += zip(ours, theirs)
    assert recorded.recorder.recorded - before == 2, "trees of one node and of five"
    assert recorded.recorder.replayed >= 9
    for ours, theirs in held:  # looked at last: no replay wrote over them
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_what_it_is_given_stays_as_it_is():
    model, before = adapt("llama"), []
    model.reserve(1, 24, 8)
    for length in (3, 9, 5):
        given = torch.tensor([length])
        with torch.inference_mode():
            model.run(given[:, None], given[:, None], given, torch.ones(1, 1, 1, dtype=torch.bool), length)
        before.append((length, given))
    assert all(given.tolist() == [length] for length, given in before)


def test_other_taps_another_cache_and_other_weights_are_other_records():
    model = adapt("llama")
    tree_pass(model, [5, 3], TREES[1])
    start = model.recorder.recorded
    for change, count in (
        (lambda: None, 0),
        (lambda: model.release(), 1),
        (lambda: model.model.model.layers[1].mlp.up_proj.weight.mul_(1.5), 1),
        (lambda: model.model.lm_head.weight.neg_(), 1),
    ):
        with torch.no_grad():
            change()
        ours = tree_pass(model, [5, 3], TREES[1])[0]
        fresh = HFModel(model.model, model.tokenizer, "model-x")
        assert (ours - tree_pass(fresh, [5, 3], TREES[1])[0]).abs().max() < 1e-4
        assert model.recorder.recorded - start == count
        start = model.recorder.recorded
    tree_pass(model, [5, 3], TREES[1], taps=())
    assert model.recorder.recorded - start == 1


def test_a_recorded_pass_asks_the_host_nothing():
    model = adapt("qwen3")
    tree_pass(model, [5, 3], TREES[1])
    cache, words = model.cache, pack_words(torch.eye(5, dtype=torch.bool).expand(2, -1, -1))
    tokens, length = torch.zeros(2, 5, dtype=torch.long), torch.tensor([5, 3])
    with torch.inference_mode(), Watch() as watch:
        cache.aim(torch.arange(10), None, cache.slots)
        model.fast.forward(tokens, tokens, cache, View(words, length, None), None, (1, "norm"))
    assert watch.found == []
    with Watch() as watch:
        length.max().item()
    assert watch.found, "the watch sees what it looks for"


def test_what_cannot_be_recorded_is_run_as_it_is():
    def fails(work, rewind):
        raise RuntimeError("operation not permitted when stream is capturing")

    model, plain = adapt("llama"), adapt("llama", HFModel)
    model.release()
    model.fast.how = fails
    with pytest.warns(UserWarning, match="cannot be recorded"):
        ours = tree_pass(model, [5, 3], TREES[1])[0]
    assert (ours - tree_pass(plain, [5, 3], TREES[1])[0]).abs().max() < 1e-4
    with warnings.catch_warnings(action="error"):
        tree_pass(model, [5, 3], TREES[2])  # not tried again


@pytest.mark.parametrize("batch", [1, 2])
def test_the_loop_on_recorded_passes(batch):
    """With a drafter whose own passes are recorded, too: the first layers of the target."""
    recorded, plain = adapt("llama"), adapt("llama", HFModel)
    prompts = [plain.chat([{"role": "user", "content": text}]) for text in PROMPTS[:3]]
    answers = [
        [
            turn.output_ids
            for turn in decode(
                *(model, prompts), drafter=SmallLM(model, layers=2), policy=trees()["dynamic"], batch=batch, budget=24
            )
        ]
        for model in (recorded, plain)
    ]
    assert answers[0] == answers[1] and recorded.recorder.replayed > 20
