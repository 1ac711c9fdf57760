"""From a configuration to working parts, and the Python call: `specresearch.engine("drafter=ngram").generate("...")`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specresearch import overrides as command
from specresearch.baseline import plain_of
from specresearch.conversations import Settings
from specresearch.decode import Decoder, Emission, Job, Parts
from specresearch.fit import check_fit
from specresearch.grammar.source import Source
from specresearch.parallel import Group, current
from specresearch.sampling import Sampler
from specresearch.types import Drafter, Grammar, Target, UserError


def make(cfg: DictConfig, group: str, **runtime: Any) -> Any:
    """Instantiate the `_target_` of a group. Whatever its constructor raises becomes a UserError that names the group."""
    node = cfg.get(group)
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UserError(f"{group} has no _target_: choose one of {', '.join(command.known()[1][group])}")
    try:
        return instantiate(node, _convert_="all", **runtime)
    except OmegaConfBaseException:
        raise
    except Exception as error:
        root: BaseException = error
        while not isinstance(root, UserError | KeyboardInterrupt) and root.__cause__ is not None:
            root = root.__cause__
        if isinstance(root, UserError | KeyboardInterrupt):
            raise root from None
        keys = ", ".join(f"{group}.{key!s}" for key in node if key != "_target_") or "it has none"
        if strange := foreign(node, group):
            option, names = strange
            raise UserError(
                f"{group}={option} has no {', '.join(names)}: leave out what sets that; if it is experiment=..., made for "
                f"another {group}, add  {' '.join(f'~{group}.{name}' for name in names)}"
            ) from error
        reason = f"{type(root).__name__}: {root}"
        raise UserError(f"{node._target_} cannot be made: {reason} (its keys: {keys})") from error


def foreign(node: DictConfig, group: str) -> tuple[str, list[str]] | None:
    """The option that this node is of, and those of its keys that this option does not have, if there are any."""
    for path in sorted((Path(command.CONF) / group).glob("*.yaml")):
        own: Any = OmegaConf.load(path)
        if own.get("_target_") == node["_target_"]:
            names = [str(key) for key in node if key not in own]
            return (path.stem, names) if names else None
    return None


def settings_of(cfg: DictConfig) -> Settings:
    values: Any = OmegaConf.to_object(cfg)
    return Settings(**{name: values[name] for name in Settings.__dataclass_fields__ if name in values})


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")


def sampler_of(cfg: DictConfig, grammar: Grammar | None = None) -> Sampler:
    values: Any = OmegaConf.to_object(cfg)
    return Sampler(**{name: values[name] for name in SAMPLING}, grammar=grammar)


def grammar_of(cfg: DictConfig) -> Source | None:
    """What the answers must follow, before the target is known whose tokens they are made of."""
    return make(cfg, "grammar") if "grammar" in cfg else None


def make_target(cfg: DictConfig) -> Target:
    """The target; with `target.tp`, made by all ranks at once."""
    group = current()
    if group is None or cfg.target.get("tp", 1) == 1:
        return make(cfg, "target")
    return group.everywhere(
        _take_part, {g: OmegaConf.to_container(cfg[g], resolve=True) for g in ("kernels", "target")}
    )


def _take_part(group: Group, config: dict[str, Any]) -> Target:
    cfg = OmegaConf.create(config)
    make(cfg, "kernels")
    return make(cfg, "target")


class Shared:
    """The target of the jobs that one process runs: kept while the configuration that it was made from stays the same."""

    def __init__(self) -> None:
        self.made_from: Any = None
        self.target: Target | None = None

    def get(self, cfg: DictConfig) -> Target:
        wanted: Any = [OmegaConf.to_container(cfg[group], resolve=True) for group in ("target", "kernels")]
        if self.target is None or self.made_from != wanted:
            self.target = None  # the old one goes before the new one comes
            self.target, self.made_from = make_target(cfg), wanted
        return self.target

    def release(self) -> None:
        """After a job: only the model stays."""
        if self.target is not None:
            self.target.release()


def build(cfg: DictConfig, target: Target | None = None, shared: Shared | None = None) -> Parts:
    """All parts of a run, checked against each other. Raises UserError for a combination that would be wrong."""
    sampler, source = sampler_of(cfg), grammar_of(cfg)
    make(cfg, "kernels")
    policy, verifier = make(cfg, "tree"), make(cfg, "verifier")
    check_fit(Drafter(), policy, verifier, sampler.temperature, cfg.lossy)  # before any model is loaded
    target = target or (shared.get(cfg) if shared else make_target(cfg))
    if source is not None:
        sampler = sampler_of(cfg, source.compile(target))
    drafter = make(cfg, "drafter", target=target)
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
    simulated: bool = False  # the accepted lengths were dictated


class Engine:
    """Answers prompts one at a time, with the parts and the sampling of its configuration."""

    def __init__(self, cfg: DictConfig, target: Target | None = None):
        self.settings, self.parts = settings_of(cfg), build(cfg, target)
        self.count = 0

    def generate(self, prompt: str | Sequence[dict[str, str]]) -> Result:
        """Answer a text, or a conversation as a list of {"role", "content"}."""
        *_, last = self._emissions(prompt)
        turn = last.turn
        lengths = [step["emitted"] for step in turn.steps]
        return Result(turn.text, turn.output_ids, lengths, turn.finish, self.parts.drafter.simulated is not None)

    def stream(self, prompt: str | Sequence[dict[str, str]]) -> Iterator[Piece]:
        """The same, token by token. The pieces' texts add up to `generate(prompt).text`.

        The engine has one cache: a stream that is read on after a later call has begun raises UserError.
        """
        streamer = Streamer(self.parts.target)
        for emission in self._emissions(prompt):
            yield from streamer.feed(emission.tokens, emission.turn.text if emission.done else None)

    def _emissions(self, prompt: str | Sequence[dict[str, str]]) -> Iterator[Emission]:
        settings, target, parts = self.settings, self.parts.target, self.parts
        ids = target.chat(conversation(prompt))
        if len(ids) + settings.max_new_tokens > target.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens, and max_new_tokens={settings.max_new_tokens} more exceed the context "
                f"of {target.context}: shorten the prompt or lower max_new_tokens"
            )
        capacity = 128 * -(-(len(ids) + settings.max_new_tokens) // 128)  # in steps: the cache is seldom made anew
        slots = max(parts.policy.asked, parts.policy.size)
        target.reserve(1, capacity, slots)
        parts.drafter.reserve(1, capacity, slots)
        self.count += 1
        turn = self.count
        job = Job(turn - 1, "prompt", 0, ids, settings.max_new_tokens)

        def decoder(parts: Parts) -> Decoder:
            kwargs = {"batch": 1, "capacity": capacity, "seed": settings.seed}
            return Decoder(parts, **kwargs, decode=target.text, stop=settings.stop)

        if parts.drafter.simulated:
            *_, plain = decoder(plain_of(parts)).run(iter([job]))
            parts.drafter.foretell(ids, plain.turn.output_ids)
        for emission in decoder(parts).run(iter([job])):
            yield emission
            if self.count != turn and not emission.done:
                raise UserError("a later call of this engine took its cache: read a stream to its end first")


def conversation(prompt: Any) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, Sequence) or not messages:
        raise UserError('a prompt is a text, or a list of {"role": ..., "content": ...}')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError('each message of a conversation is {"role": ..., "content": ...} with texts')
    if not messages[-1]["content"].strip():
        raise UserError("the prompt is empty: write something to answer")
    return list(messages)


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
    try:
        given = command.prepare(list(overrides))
        if GlobalHydra.instance().is_initialized():
            return Engine(compose("config", given), target)
        with initialize_config_dir(command.CONF, version_base="1.3"):
            return Engine(compose("config", given), target)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(command.explain(error)) from None
