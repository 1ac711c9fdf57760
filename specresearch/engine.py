"""From a configuration to working parts, and the Python call: `specresearch.engine("drafter=ngram").generate("...")`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specresearch.decode import Decoder, Job, Parts
from specresearch.fit import check_fit
from specresearch.sampling import Sampler
from specresearch.types import Drafter, Target, UserError

CONF = str(Path(__file__).resolve().parent / "conf")


def make(node: DictConfig, **runtime: Any) -> Any:
    """Instantiate a `_target_` node. What its constructor raises reaches the caller as it was raised."""
    try:
        return instantiate(node, _convert_="all", **runtime)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        raise


def build(cfg: DictConfig, target: Target | None = None) -> Parts:
    """All parts of a run, checked against each other. Raises UserError for a combination that would be wrong."""
    sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")
    values: Any = OmegaConf.to_object(cfg)
    sampler = Sampler(**{key: values[key] for key in sampling})
    policy, verifier = make(cfg.tree), make(cfg.verifier)
    check_fit(Drafter(), policy, verifier, sampler.temperature, cfg.lossy)  # before any model is loaded
    target = target or make(cfg.target)
    drafter = make(cfg.drafter, target=target)
    policy.prepare(target.seconds)
    check_fit(drafter, policy, verifier, sampler.temperature, cfg.lossy)
    return Parts(target, drafter, policy, verifier, sampler)


@dataclass(frozen=True)
class Piece:
    """Text that one token added. `drafted`: it was an accepted draft, else the target's own (bonus or prefill)."""

    text: str
    token: int
    drafted: bool


@dataclass(frozen=True)
class Result:
    text: str
    ids: list[int]
    accepted_lengths: list[int]
    finish: str


class Engine:
    """Answers prompts one at a time, with the parts and the sampling of its configuration."""

    def __init__(self, cfg: DictConfig, target: Target | None = None):
        self.cfg, self.parts = cfg, build(cfg, target)
        self.count = 0

    def generate(self, prompt: str | Sequence[dict[str, str]]) -> Result:
        """Answer a text, or a conversation as a list of {"role", "content"}."""
        pieces = self._emissions(prompt)
        turn = None
        for emission in pieces:
            turn = emission.turn
        assert turn is not None
        return Result(turn.text, turn.output_ids, [step["emitted"] for step in turn.steps], turn.finish)

    def stream(self, prompt: str | Sequence[dict[str, str]]) -> Iterator[Piece]:
        """The same, token by token. The pieces' texts add up to `generate(prompt).text`."""
        streamer = Streamer(self.parts.target)
        for emission in self._emissions(prompt):
            yield from streamer.feed(emission.tokens, emission.turn.text if emission.done else None)

    def _emissions(self, prompt: str | Sequence[dict[str, str]]) -> Iterator[Any]:
        cfg, target, parts = self.cfg, self.parts.target, self.parts
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = target.chat(messages)
        if not ids or len(ids) + cfg.max_new_tokens > target.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens, max_new_tokens={cfg.max_new_tokens}, context {target.context}"
            )
        capacity = 128 * -(-(len(ids) + cfg.max_new_tokens) // 128)  # in steps, so that the cache is seldom made anew
        slots = max(parts.policy.asked, parts.policy.size)
        target.reserve(1, capacity, slots)
        parts.drafter.reserve(1, capacity, slots)
        decoder = Decoder(parts, batch=1, capacity=capacity, seed=cfg.seed, decode=target.text, stop=list(cfg.stop))
        self.count += 1
        job = Job(self.count - 1, "prompt", 0, ids, cfg.max_new_tokens)
        return decoder.run(iter([job]))


class Streamer:
    """Turns tokens into text as they come. A token that ends in the middle of a character waits for its successors."""

    def __init__(self, target: Target):
        self.target = target
        self.ids: list[int] = []
        self.shown = ""

    def feed(self, tokens: Sequence[int], final: str | None = None) -> Iterator[Piece]:
        """`final` = the whole answer, once it is known; nothing beyond it is shown."""
        first = not self.ids
        for place, token in enumerate(tokens, 1):
            self.ids.append(token)
            text = self.target.text(self.ids)
            if final is not None and (place == len(tokens) or not final.startswith(text)):
                text = final
            if text.endswith("\ufffd") and final is None:
                text = self.shown
            new, self.shown = text[len(self.shown) :], text if len(text) > len(self.shown) else self.shown
            yield Piece(new, token, drafted=not first and place < len(tokens))


def engine(*overrides: str, target: Target | None = None) -> Engine:
    """`engine("drafter=ngram", "tree.topk=4")`: the overrides of the command line. `target` = one already loaded."""
    if GlobalHydra.instance().is_initialized():
        return Engine(compose("config", list(overrides)), target)
    with initialize_config_dir(CONF, version_base="1.3"):
        return Engine(compose("config", list(overrides)), target)
