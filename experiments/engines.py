"""The decoders that experiments/peers.py lays side by side: transformers' own, those of two other libraries, and ours.

All of them have the same target: same weights, to the bit. Ours are held by the adapter, which changes the class of a model's
`nn.Linear` and may round its matrices to half precision; so every other library gets a model of its own, made plain by
transformers and filled with what the adapter's holds then, rounded once, computed with in float32. Where a library's own
form of a drafter can hold ours (a draft model, Medusa heads), it is given ours, on the same draft vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
import transformers
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch import Tensor, nn
from torch.nn import functional as F

from specresearch import overrides
from specresearch.build import build
from specresearch.decode import Decoder, Job, Parts
from specresearch.types import UserError

Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """`passes` of the target, the one over the prompt counted; `time` by part, where the decoder tells."""

    ids: list[int]
    passes: int
    time: Mapping[str, float] | None = None


Decode = Callable[[list[int], int], Answer]  # prompt, most new tokens


@dataclass(frozen=True)
class Engine:
    """A row. Its first setting is the library's own default; `tune=true` tries the others too."""

    library: str
    what: str
    start: Callable[[Models, Any], Decode]
    settings: Sequence[Setting] = field(default_factory=lambda: [{}])
    dtype: torch.dtype | None = None  # None: as the target computes


class Spread(nn.Module):
    """A vocabulary matrix of some rows alone -> logits of the whole vocabulary, -inf where the matrix has no row."""

    def __init__(self, weight: Tensor, kept: Tensor, size: int):
        super().__init__()
        self.weight, self.size = nn.Parameter(weight.detach().clone(), requires_grad=False), size
        self.register_buffer("kept", kept.clone())

    def forward(self, x: Tensor) -> Tensor:
        some = F.linear(x, self.weight)
        full = some.new_full((*some.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.kept, some)


class Models:
    """The target as the adapter loads it, and plain copies of it and of our drafters, one for each library."""

    def __init__(self, given: Sequence[str]):
        self.given = list(given)
        self.copies: dict[tuple[str, torch.dtype | None], Any] = {}

    def parts(self, *chosen: str, name: str = "") -> Parts:
        """Ours. Overrides hold for all, `NAME:key=value` for one."""
        return build(configuration([*chosen, *own(name, self.given)]), self.target)

    @cached_property
    def target(self) -> Any:
        return build(configuration(["drafter=none", *own("", self.given)])).target

    def forget(self) -> None:
        """The adapter's target, where only copies are needed from here on."""
        self.__dict__.pop("target", None)

    def plain(self, library: str, dtype: torch.dtype | None = None) -> Any:
        """A model that no other library and no adapter has touched."""
        if (library, dtype) not in self.copies:
            self.copies[library, dtype] = copy_of(self.target.model, dtype)
        return self.copies[library, dtype]

    def small(self, library: str) -> Any:
        """Our distilled small LM as an ordinary model, on the library's own copy of the target's embedding."""
        drafter: Any = self.parts("drafter=small_lm", name="small_lm").drafter
        student, target = drafter.model.model, self.plain(library)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(student.config, dtype=torch.float32)
        weights = {n: t.detach().clone() for n, t in student.state_dict().items() if n.startswith("model.")}
        made.load_state_dict(weights, strict=False, assign=True)
        made.model.embed_tokens.weight = target.get_input_embeddings().weight
        made.model.rotary_emb = type(made.model.rotary_emb)(config=student.config).to(student.device)
        size = student.config.vocab_size
        kept = student.vocabulary.kept if hasattr(student, "vocabulary") else torch.arange(size)
        made.lm_head = Spread(student.get_output_embeddings().weight, kept, size)
        made.generation_config = transformers.GenerationConfig.from_model_config(student.config)
        return made.eval().requires_grad_(False)


def own(name: str, given: Sequence[str]) -> list[str]:
    return [a.removeprefix(f"{name}:") for a in given if ":" not in a.split("=")[0] or a.startswith(f"{name}:")]


def configuration(chosen: Sequence[str]) -> Any:
    chosen = overrides.prepare(["tracker=none", *chosen])
    if GlobalHydra.instance().is_initialized():
        return compose("config", chosen)
    with initialize_config_dir(overrides.CONF, version_base="1.3"):
        return compose("config", chosen)


def copy_of(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A plain model with the same weights, or with those rounded to `dtype`."""
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(model.config, dtype=dtype or model.dtype)
    weights = {
        name: tensor.detach().to(dtype or tensor.dtype, copy=True) for name, tensor in model.state_dict().items()
    }
    made.load_state_dict(weights, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config=model.config)  # its buffers are not in the state dict
    made.to(model.device)
    made.generation_config = model.generation_config
    return made.eval().requires_grad_(False)


class Passes:
    """Counts the calls of a model while it decodes."""

    def __init__(self, model: nn.Module):
        self.count = 0
        model.register_forward_pre_hook(self._call)

    def _call(self, *_: Any) -> None:
        self.count += 1


# -- ours ------------------------------------------------------------------------------------------------------------------


def ours(name: str, *chosen: str) -> Callable[[Models, Any], Decode]:
    def start(models: Models, setting: Any) -> Decode:
        parts = models.parts(*chosen, *setting.get("overrides", ()), name=name)
        target, slots = parts.target, max(parts.policy.asked, parts.policy.size)

        def decode(prompt: list[int], budget: int) -> Answer:
            capacity = 128 * -(-(len(prompt) + budget) // 128)  # in steps: the cache is seldom made anew
            target.reserve(1, capacity, slots)
            parts.drafter.reserve(1, capacity, slots)
            decoder = Decoder(parts, batch=1, capacity=capacity, seed=0, decode=target.text, stop=[])
            *_, last = decoder.run(iter([Job(0, "prompt", 0, prompt, budget)]))
            return Answer(last.turn.output_ids, decoder.passes + 1, dict(decoder.clock.seconds))

        return decode

    return start


# -- transformers ----------------------------------------------------------------------------------------------------------


def generate(extra: Callable[[Models, Any], Mapping[str, Any]], dtype: torch.dtype | None = None) -> Any:
    def start(models: Models, setting: Any) -> Decode:
        model, eos = models.plain("transformers", dtype), models.target.eos
        passes, more = Passes(model), extra(models, setting)

        def decode(prompt: list[int], budget: int) -> Answer:
            passes.count, ids = 0, torch.tensor([prompt])
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": budget, "do_sample": False, **more}
            output = model.generate(ids, eos_token_id=list(eos), pad_token_id=eos[0], **options)
            return Answer(output[0, len(prompt) :].tolist(), passes.count)

        return decode

    return start


def assisted(models: Models, setting: Any) -> Mapping[str, Any]:
    small = models.small("transformers")
    small.generation_config.update(**setting)
    return {"assistant_model": small}


# -- flashspec -------------------------------------------------------------------------------------------------------------


def flashspec(*kinds: str) -> Callable[[Models, Any], Decode]:
    def start(models: Models, setting: Any) -> Decode:
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        model, device = models.plain("flashspec"), models.target.device
        make = {
            "lookup": NgramDrafter,
            "model": lambda: HuggingFaceDrafter("small", device, model=models.small("flashspec")),
        }
        config = FlashSpecConfig(
            device=str(device),
            dtype="float32",
            drafter_strategy=setting.get("strategy", "bandit"),  # of one arm: nothing is left to choose
            bandit=BanditConfig(n_arms=1),
            sampling=SamplingConfig(temperature=0.0, gamma=setting.get("gamma", 4)),
            eos_token_ids=models.target.eos,
        )
        target = TargetModel("target", device, torch.float32, model=model)
        engine, passes = SpeculativeEngine(config, [make[kind]() for kind in kinds], target), Passes(model)

        def decode(prompt: list[int], budget: int) -> Answer:
            passes.count = 0
            result = engine.generate(torch.tensor([prompt]), max_new_tokens=budget)
            return Answer(result.output_ids[0, : result.n_tokens_generated].tolist(), passes.count)

        return decode

    return start


# -- economize -------------------------------------------------------------------------------------------------------------


def economize(technique: Callable[[Models, Any], Any], finish: Callable[[Models, Any], None] | None = None) -> Any:
    """`technique` -> the library's configuration; `finish` gives the attached drafter its weights."""

    def start(models: Models, setting: Any) -> Decode:
        import economize as library
        from economize.techniques.draft_model import technique as draft_model

        model = models.plain("economize")
        known = {"load_draft_model": lambda *_: models.small("economize"), "load_local_tokenizer": lambda *_: None}
        with patch.multiple(
            draft_model, **known
        ):  # it reads a draft model from a folder alone, as a class that it knows
            options = {"cycle_length": setting.get("cycle_length", 4), "min_confidence": setting.get("min_confidence")}
            config, calibration = technique(models, setting), models_text(models)
            wrapped = library.apply(model, config, decoding=library.DecodeConfig(**options), calibration=calibration)
        if finish is not None:
            finish(models, wrapped)
        return decoding(wrapped, models.target.eos)

    return start


def decoding(wrapped: Any, eos: tuple[int, ...]) -> Decode:
    def decode(prompt: list[int], budget: int) -> Answer:
        result = wrapped.decode(torch.tensor(prompt), budget, stop=eos)
        return Answer(result.tokens.tolist(), result.cost.count("exact"))

    return decode


def models_text(models: Models, tokens: int = 64) -> Tensor:
    """A text to calibrate on: a search of layers to skip counts on it which hurt least [1, tokens]."""
    text = "The lighthouse keeper counted the boats as they came home in the evening, and wrote down every name. " * 3
    return torch.tensor([models.target.encode(text)[:tokens]])


def config_of(module: str, name: str, **fields: Any) -> Any:
    return getattr(__import__(f"economize.techniques.{module}", fromlist=[name]), name)(**fields)


def draft_model(models: Models, setting: Any) -> Any:
    return config_of("draft_model", "DraftModelConfig", model="the distilled small LM")


def early_exit(models: Models, setting: Any) -> Any:
    layer = max(1, round(len(models.target.blocks) * setting["depth"]))
    return config_of("early_exit", "EarlyExitConfig", exit_layer=layer, head="shared")


def frspec(models: Models, setting: Any) -> Any:
    drafter: Any = models.parts("drafter=small_lm", name="small_lm").drafter
    kept = drafter.vocabulary.kept.tolist()
    fields = {"vocab_size": len(kept), "token_ids": tuple(kept)}
    return config_of("frspec", "FRSpecConfig", drafter=early_exit(models, setting), **fields)


def layer_skip(models: Models, setting: Any) -> Any:
    return config_of(
        "layer_skip", "LayerSkipConfig", num_skip=max(1, int(len(models.target.blocks) * setting["share"]))
    )


def medusa(models: Models, setting: Any) -> Any:
    c = heads_of(models).config
    return config_of("medusa", "MedusaConfig", num_heads=c.heads, num_layers=c.layers, head="own")


def our_heads(models: Models, wrapped: Any) -> None:
    """Our Medusa heads, on their one vocabulary matrix, in the place of the library's untrained ones."""
    ours = heads_of(models)
    shared = Spread(ours.lm_head.weight, ours.vocabulary.kept, models.target.vocab_size)
    for blocks, head in zip(ours.blocks, wrapped.techniques["medusa"].heads):
        head.blocks.load_state_dict(blocks.state_dict())
        head.proj = shared


def heads_of(models: Models) -> Any:
    drafter: Any = models.parts("drafter=medusa", name="medusa").drafter
    return drafter.heads


def eagle3(models: Models, setting: Any) -> Decode:
    """Our EAGLE head, exported as its loader wants it. It says what it cannot compute."""
    import tempfile
    from pathlib import Path

    import economize as library

    from specresearch.models.checkpoints import write
    from specresearch.models.exporting import for_vllm

    drafter: Any = models.parts("drafter=eagle", name="eagle").drafter
    with tempfile.TemporaryDirectory() as folder:
        written = for_vllm(drafter.head, {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}, 3)
        write(Path(folder), *written)
        return decoding(library.load(models.plain("economize"), folder), models.target.eos)


def cannot(why: str) -> Callable[[Models, Any], Decode]:
    def start(models: Models, setting: Any) -> Decode:
        raise UserError(why)

    return start


# -- all -------------------------------------------------------------------------------------------------------------------


def cycles(*lengths: int, **more: Any) -> list[Setting]:
    return [{"cycle_length": n, **more} for n in lengths]


def trees(*shapes: tuple[int, int, int]) -> list[Setting]:
    """(depth, topk, size)"""
    return [{"overrides": [f"tree.depth={d}", f"tree.topk={k}", f"tree.size={n}"]} for d, k, n in shapes]


def chains(*depths: int) -> list[Setting]:
    return [{"overrides": ["tree=chain", f"tree.depth={d}"]} for d in depths]


HF, FLASHSPEC, ECONOMIZE, OURS = "transformers", "flashspec", "economize", "ours"
WAITS = [
    {"num_assistant_tokens": n, "assistant_confidence_threshold": c}
    for n, c in ((20, 0.4), (5, 0.4), (3, 0.0), (2, 0.0))
]
ENGINES: dict[str, Engine] = {
    "hf": Engine(HF, "generate", generate(lambda *_: {})),
    "hf_bf16": Engine(HF, "generate, bfloat16", generate(lambda *_: {}, torch.bfloat16), dtype=torch.bfloat16),
    "hf_lookup": Engine(
        HF, "prompt lookup", generate(lambda _, s: s), [{"prompt_lookup_num_tokens": n} for n in (10, 5, 3)]
    ),
    "hf_assisted": Engine(HF, "assisted, our small LM", generate(assisted), WAITS),
    "flashspec_lookup": Engine(FLASHSPEC, "lookup", flashspec("lookup"), [{"gamma": n} for n in (4, 2, 6)]),
    "flashspec_model": Engine(
        FLASHSPEC, "draft model, our small LM", flashspec("model"), [{"gamma": n} for n in (4, 2, 1)]
    ),
    "flashspec_hybrid": Engine(
        FLASHSPEC,
        "lookup, else our small LM",
        flashspec("model", "lookup"),
        [{"strategy": name} for name in ("composite-g6-f2", "composite-g4")],
    ),
    "economize_lookup": Engine(
        ECONOMIZE, "lookup", economize(lambda *_: config_of("lookup", "LookupConfig")), cycles(4, 3, 7)
    ),
    "economize_model": Engine(ECONOMIZE, "draft model, our small LM", economize(draft_model), cycles(4, 3, 2)),
    "economize_hybrid": Engine(
        ECONOMIZE,
        "lookup, else our small LM",
        economize(
            lambda m, s: config_of("hybrid", "HybridConfig", fallback=draft_model(m, s), max_drafts=s.get("most"))
        ),
        [*cycles(4, 3), *cycles(7, most=2)],
    ),
    "economize_exit": Engine(
        ECONOMIZE,
        "early exit",
        economize(early_exit),
        [*cycles(4, depth=0.5), *cycles(2, depth=0.3), *cycles(2, depth=0.5)],
    ),
    "economize_frspec": Engine(
        ECONOMIZE, "early exit, our draft vocabulary", economize(frspec), [*cycles(4, depth=0.5), *cycles(2, depth=0.3)]
    ),
    "economize_skip": Engine(ECONOMIZE, "layer skipping", economize(layer_skip), cycles(4, 2, share=0.34)),
    "economize_medusa": Engine(ECONOMIZE, "Medusa, our heads", economize(medusa, our_heads), cycles(4, 3, 2)),
    "economize_eagle3": Engine(ECONOMIZE, "EAGLE-3, our head", eagle3),
    "economize_jump": Engine(
        ECONOMIZE, "jump", cannot("its predictor must be trained, and none is published for this target")
    ),
    "economize_mtp": Engine(ECONOMIZE, "multi-token prediction", cannot("this target ships no such modules")),
    "plain": Engine(OURS, "plain", ours("plain", "drafter=none")),
    "ngram": Engine(OURS, "ngram", ours("ngram", "drafter=ngram"), [{}, *chains(3, 5, 7), *trees((4, 2, 6))]),
    "medusa": Engine(OURS, "medusa", ours("medusa", "drafter=medusa"), [{}, *trees((1, 4, 4), (2, 2, 4))]),
    "small_lm": Engine(
        OURS, "small_lm", ours("small_lm", "drafter=small_lm"), [{}, *chains(1, 2, 3), *trees((1, 3, 4))]
    ),
    "eagle": Engine(OURS, "eagle", ours("eagle", "drafter=eagle")),
    "eagle_tuned": Engine(
        OURS,
        "eagle, tuned tree",
        ours("eagle_tuned", "drafter=eagle"),
        [{}, *trees((1, 3, 4), (1, 2, 3), (2, 2, 4), (3, 2, 6), (3, 4, 8)), *chains(2, 3)],
    ),
}


def start(name: str, models: Models, setting: Setting) -> Decode:
    """Raises UserError that says why it cannot run."""
    engine = ENGINES[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return engine.start(models, setting)
    except (ImportError, UserError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (FLASHSPEC, ECONOMIZE)
        raise UserError(
            f"{error.name} is not installed: pip install --no-deps it, or '.[peers]'" if missing else str(error)
        ) from None
