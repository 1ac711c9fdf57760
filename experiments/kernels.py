"""Time of each kernel against the bytes it must move: `python experiments/kernels.py [--quick] [--target smollm2]`.

On a GPU torch and Triton side by side, device time under graph replay; on a CPU torch alone. Copy bandwidth is measured in
the same run. Figures: microseconds (median), and the share of the copy bandwidth that the floor of bytes amounts to.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specresearch.kernels import attention, backend, cache, mask, sampling, tree, verify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST_BYTES = 1 << 30 if DEVICE == "cpu" else 48 << 30
LEVELS = 6
BATCHES, NODES, VOCABS = (1, 8, 64), (8, 32, 64, 256), (32_000, 128_000)


@dataclass(frozen=True)
class Case:
    name: str
    size: str
    floor: int  # bytes that must move
    held: int  # bytes of the inputs
    make: Callable[[], Callable[[], object]]  # inputs first, then the call that is timed


def trees(batch: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Parents [B, N] of trees at most LEVELS deep, and tokens."""
    generator = torch.Generator().manual_seed(0)
    parent = torch.zeros(batch, nodes, dtype=torch.long)
    depth = torch.zeros(batch, nodes, dtype=torch.long)
    for node in range(1, nodes):
        above = (torch.rand(batch, generator=generator) * node).long()
        above = torch.where(depth.gather(1, above[:, None])[:, 0] < LEVELS, above, 0)
        parent[:, node] = above
        depth[:, node] = depth.gather(1, above[:, None])[:, 0] + 1
    parent[:, 0] = -1
    tokens = torch.randint(0, 1000, (batch, nodes), generator=generator)
    return parent.to(DEVICE), tokens.to(DEVICE)


def laws(*shape: int) -> Tensor:
    probs = torch.rand(*shape, device=DEVICE).pow_(8)
    return probs.div_(probs.sum(-1, keepdim=True))


def build(batch: int, nodes: int) -> Case:
    def make() -> Callable[[], object]:
        parent, _ = trees(batch, nodes)
        return lambda: (tree.ancestor_words(parent, LEVELS), tree.links(parent))

    moved = batch * nodes * (4 * 8 + 4 * mask.words_of(nodes))
    return Case("build", f"B={batch} N={nodes}", moved, moved, make)


def greedy(batch: int, nodes: int) -> Case:
    def make() -> Callable[[], object]:
        parent, tokens = trees(batch, nodes)
        links = tree.links(parent)
        first = links[0].clamp(min=0)
        choice = torch.where(links[0] >= 0, tokens.gather(1, first), -1)  # the first child is right, to the leaf
        return lambda: verify.greedy_links(tokens, links, LEVELS, choice)

    moved = batch * (LEVELS + 1) * 5 * 8
    return Case("verify greedy", f"B={batch} N={nodes}", moved, batch * nodes * 32, make)


def target_only(batch: int, nodes: int, vocab: int) -> Case:
    def make() -> Callable[[], object]:
        parent, tokens = trees(batch, nodes)
        links, p = tree.links(parent), laws(batch, nodes, vocab)
        coins = torch.rand(batch, nodes, dtype=torch.float64, device=DEVICE)
        return lambda: verify.target_only_links(tokens, links, LEVELS, p, coins, coins[:, 0], 1.0, 1.0)

    # One row of p is read whole, for the last draw; of the others only the tokens that are tried.
    return Case(
        "verify target-only", f"B={batch} N={nodes} V={vocab}", 4 * batch * vocab, 4 * batch * nodes * vocab, make
    )


def warp(batch: int, nodes: int, vocab: int, **how: float) -> Case:
    def make() -> Callable[[], object]:
        logits = torch.randn(batch * nodes, vocab, device=DEVICE) * 3
        return lambda: sampling.warp(logits, 0.8, **how)  # type: ignore[arg-type]

    name = "warp" + "".join(f" {key}" for key in how)
    moved = 8 * batch * nodes * vocab
    return Case(name, f"B={batch} N={nodes} V={vocab}", moved, 2 * moved, make)


def pick(batch: int, vocab: int) -> Case:
    def make() -> Callable[[], object]:
        weights, uniform = laws(batch, vocab), torch.rand(batch, dtype=torch.float64, device=DEVICE)
        return lambda: sampling.pick(weights, uniform)

    return Case("pick", f"B={batch} V={vocab}", 4 * batch * vocab, 4 * batch * vocab, make)


def commit(batch: int, layers: int, heads: int, width: int, dtype: torch.dtype) -> Case:
    def make() -> Callable[[], object]:
        slots = 512
        buffer = torch.zeros(layers, batch * slots, heads, width, dtype=dtype, device=DEVICE)
        base = torch.arange(batch, device=DEVICE)[:, None] * slots
        place = torch.arange(1, LEVELS + 1, device=DEVICE)
        source, target = base + 100 + 2 * place, base + 100 + place
        return lambda: cache.move(buffer, source, target)

    moved = 2 * layers * batch * LEVELS * heads * width * dtype.itemsize
    held = layers * batch * 512 * heads * width * dtype.itemsize
    return Case("commit", f"B={batch} L={layers} {heads}x{width} {str(dtype)[6:]}", moved, held, make)


def attend(batch: int, nodes: int, prefix: int) -> Case:
    heads, kv_heads, width = 32, 8, 128
    dtype = torch.bfloat16

    def make() -> Callable[[], object]:
        parent, _ = trees(batch, nodes)
        words, slots = tree.ancestor_words(parent, LEVELS), prefix + nodes
        query = torch.randn(batch, heads, nodes, width, device=DEVICE, dtype=dtype)
        kv = torch.randn(batch, slots, kv_heads, 2 * width, device=DEVICE, dtype=dtype).transpose(1, 2)
        length = torch.full((batch,), prefix, device=DEVICE)
        dense = None
        if not backend.on_triton(query):
            dense = attention.additive(mask.unpack(words, nodes), length, slots, dtype)
        return lambda: attention.tree_attention(query, kv[..., :width], kv[..., width:], words, length, dense=dense)

    moved = dtype.itemsize * batch * width * 2 * (kv_heads * (prefix + nodes) + heads * nodes)
    return Case("attention", f"B={batch} N={nodes} S={prefix}", moved, 2 * moved, make)


def cases(quick: bool) -> Iterator[Case]:
    batches, node_counts, vocabs = ((1, 64), (64,), (128_000,)) if quick else (BATCHES, NODES, VOCABS)
    for batch in batches:
        for nodes in node_counts:
            yield build(batch, nodes)
            yield greedy(batch, nodes)
            yield attend(batch, nodes, 8192)
            for vocab in vocabs:
                yield target_only(batch, nodes, vocab)
                yield warp(batch, nodes, vocab)
                yield warp(batch, nodes, vocab, top_k=50, top_p=0.95)
        for vocab in vocabs:
            yield pick(batch, vocab)
        yield commit(batch, 30, 3, 128, torch.float32)  # SmolLM2-135M
        yield commit(batch, 32, 8, 256, torch.bfloat16)  # an 8B model


def microseconds(call: Callable[[], object], budget: float = 0.5) -> float:
    """Median time of a call; on a GPU of its replay from a graph."""
    for _ in range(2):
        call()
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(10):
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(20):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 100)
        return statistics.median(times)
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < budget and len(times) < 100):
        now = time.perf_counter()
        call()
        times.append((time.perf_counter() - now) * 1e6)
        if time.perf_counter() - begin > 4 * budget:
            break
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond."""
    source = torch.zeros(1 << 28 if DEVICE == "cuda" else 1 << 26, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))


def show(case: Case, bandwidth: float) -> None:
    if case.held > MOST_BYTES:
        print(f"{case.name:22} {case.size:28} skipped: {case.held / 2**30:.1f} GiB of inputs")
        return
    line = f"{case.name:22} {case.size:28} {case.floor / 1e6:9.3f} MB "
    for name in ("torch", "triton") if DEVICE == "cuda" and backend.triton else ("torch",):
        backend.use(name=name)  # type: ignore[arg-type]
        try:
            took = microseconds(case.make())
            line += f"  {name} {took:10.1f} us {100 * case.floor / took / bandwidth:5.1f}%"
        except RuntimeError as fault:  # on a GPU the reference may not be capturable
            line += f"  {name} {type(fault).__name__}: {str(fault).splitlines()[0][:60]}"
    print(line, flush=True)


def against_a_pass(name: str) -> None:
    """Build, greedy verification and commit at B=1, N=64 as a share of a pass of the real target, in turns."""
    from specresearch.models import smollm2

    assert name == "smollm2"
    target = smollm2.load(dtype="float32", device=DEVICE)
    calls = [c.make() for c in (build(1, 64), greedy(1, 64), commit(1, 30, 3, 128, torch.float32))]
    kernels, passes = [], []
    for _ in range(5):
        kernels.append(sum(microseconds(call, 0.1) for call in calls))
        passes.append(target.seconds(64) * 1e6)
    share = statistics.median(k / p for k, p in zip(kernels, passes))
    print(
        f"build + greedy verify + commit, B=1 N=64: {statistics.median(kernels):.0f} us; a SmolLM2 pass over 64 nodes: "
        f"{statistics.median(passes) / 1e3:.0f} ms; share {100 * share:.2f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the sizes that goals are stated for")
    parser.add_argument("--target", choices=["smollm2"], help="also compare with a pass of this model")
    options = parser.parse_args()
    where = (
        torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    bandwidth = copy_bandwidth()
    print(f"{where}; torch {torch.__version__}; copies at {bandwidth / 1e3:.1f} GB/s (read + write)")
    print("kernel, size, bytes it must move; median time, share of the copy bandwidth")
    with torch.inference_mode():
        for case in cases(options.quick):
            show(case, bandwidth)
        backend.use(name="auto")
        if options.target:
            against_a_pass(options.target)


if __name__ == "__main__":
    main()
