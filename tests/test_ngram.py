"""The n-gram drafter's index against a rescan of the text, and its bookkeeping by row."""

import math

import pytest
import torch
from helpers import decode, naive_greedy, trees
from hypothesis import given
from hypothesis import strategies as st

from specresearch.drafters.ngram import Index, NGram
from specresearch.types import Frontier, Step

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def rescan(tokens, line, min_n, max_n, backoff, recent):
    """By definition: the length of the match at every site whose next token is known, the longest's votes being 1."""
    sites = {}
    for at in range(len(tokens) - 1):
        n = 0
        while n < min(max_n, at + 1, len(line)) and tokens[at - n] == line[-1 - n]:
            n += 1
        if n >= min_n:
            sites[at] = n
    votes = {}
    for at, n in sites.items():
        vote = backoff ** (max(sites.values()) - n)
        token = tokens[at + 1]
        if recent:
            votes[token] = max(votes.get(token, 0), vote / (len(tokens) - 1 - at))
        else:
            votes[token] = votes.get(token, 0) + vote
    return votes


@given(
    texts,
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 40),
)
def test_votes_equal_a_rescan(tokens, path, min_n, more, recent, cut):
    index = Index(min_n, min_n + more)
    index.extend(tokens[:cut])
    index.extend(tokens[cut:])
    line = tokens + path
    found = index.votes(line, 0.3, recent)
    assert found == pytest.approx(rescan(tokens, line, min_n, min_n + more, 0.3, recent))


def step_of(lines, live=None):
    width = max(map(len, lines)) + 3
    tokens = torch.tensor([line + [9] * (width - len(line)) for line in lines])  # what stands behind must not count
    length = torch.tensor([len(line) - 1 for line in lines])
    alive = torch.tensor(live or [True] * len(lines))
    root = torch.tensor([line[-1] for line in lines])
    return Step(root, root, length, alive, length * 0 + 50, tokens, None, int(length.max()))


def ask(drafter, step, paths):
    batch, width = len(paths), len(paths[0])
    deep = max(len(path) for row in paths for path in row)
    path = torch.tensor([[node + [-1] * (deep - len(node)) for node in row] for row in paths])
    zeros = torch.zeros(batch, width, dtype=torch.long)
    return drafter.expand(Frontier(step, zeros, zeros, zeros.bool()[..., None], path, zeros, 0))


@pytest.mark.parametrize("order", ["recency", "frequency"])
def test_each_row_has_its_own_text_and_each_node_its_own_path(target, order):
    drafter = NGram(target, max_n=3, min_n=1, order=order, backoff=0.1)
    lines = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 5], [7, 7]]
    paths = [[[], [3]], [[], [6]], [[], [7]]]
    for _ in range(2):  # each step, with more text
        logits = ask(drafter, step_of(lines, [True, True, False]), paths)
        for row in (0, 1):
            for node, path in enumerate(paths[row]):
                votes = rescan(lines[row], lines[row] + path, 1, 3, 0.1, order == "recency")
                expected = torch.full((target.vocab_size,), -torch.inf)
                for token, vote in votes.items():
                    expected[token] = math.log(vote)
                torch.testing.assert_close(logits[row, node], expected)
        assert (logits[2] == -torch.inf).all(), "a row that is not live has no text"
        lines = [line + line[:2] for line in lines]


def test_another_text_in_a_row_is_another_index(target):
    drafter = NGram(target, max_n=2, min_n=1, order="recency", backoff=0.1)
    ask(drafter, step_of([[1, 2, 1]]), [[[], [2]]])
    drafter.extend([0], torch.zeros(1, 1), torch.ones(1), None)  # the row is refilled
    logits = ask(drafter, step_of([[3, 4, 5, 1]]), [[[], [2]]])
    assert (logits == -torch.inf).all(), "what stood there before is forgotten"


@pytest.mark.parametrize("batch", [1, 3])
def test_refilled_rows_in_the_loop(target, batch):
    prompts = [[5, 6, 7, 5, 6], [8, 9, 8], [5, 6], [1], [9, 8, 9, 8]]
    expected = [naive_greedy(target, prompt, 16) for prompt in prompts]
    lookup = NGram(target, max_n=3, min_n=1, order="frequency", backoff=0.1)
    for tree in ("dynamic", "best_first", "auto"):
        turns = decode(target, prompts, drafter=lookup, policy=trees()[tree], batch=batch, budget=16)
        assert [turn.output_ids for turn in turns] == expected


def test_a_question_costs_no_more_in_a_long_text():
    """Counted, not timed: a token is entered once for each length, however long the text is."""
    index = Index(2, 4)
    index.extend([i % 7 for i in range(5000)])
    assert len(index.after) == 3 * 7 and all(len(followers) == 1 for followers in index.after.values())
