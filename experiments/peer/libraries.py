"""How each library of experiments/peers.py is asked: from a setting to a function that decodes. A library is imported when it
is asked for the first time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peer.plain_models import Models, Passes, Spread
from torch import Tensor

from specresearch.decode import Decoder, Job
from specresearch.models.checkpoints import write
from specresearch.models.exporting import for_vllm
from specresearch.types import UserError

Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """`passes` of the target, the one over the prompt counted; `time` by part, where the decoder tells."""

    ids: list[int]
    passes: int
    time: Mapping[str, float] | None = None


Decode = Callable[[list[int], int], Answer]  # prompt, most new tokens


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
    """The search for layers to skip takes a minute: once a process."""
    if "layer_skip" in models.found:
        return config_of("layer_skip", "LayerSkipConfig", skip_layers=models.found["layer_skip"])
    count = max(1, int(len(models.target.blocks) * setting["share"]))
    return config_of("layer_skip", "LayerSkipConfig", num_skip=count)


def keep_skipped(models: Models, wrapped: Any) -> None:
    models.found["layer_skip"] = wrapped.techniques["layer_skip"].skip_layers


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
    import economize as library

    drafter: Any = models.parts("drafter=eagle", name="eagle").drafter
    with tempfile.TemporaryDirectory() as folder:
        written = for_vllm(drafter.head, {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}, 3)
        write(Path(folder), *written)
        return decoding(library.load(models.plain("economize"), folder), models.target.eos)


def cannot(why: str) -> Callable[[Models, Any], Decode]:
    def start(models: Models, setting: Any) -> Decode:
        raise UserError(why)

    return start
