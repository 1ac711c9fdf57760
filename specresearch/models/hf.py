"""The adapter: any Hugging Face causal LM with ordinary attention becomes a Target, with no copied modelling file."""

from __future__ import annotations

import copy
import hashlib
import inspect
import statistics
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from specresearch.grammar.rows import Walk
from specresearch.kernels.attention import additive, serves
from specresearch.kernels.backend import chosen
from specresearch.kernels.mask import pack_words, words_of
from specresearch.kernels.tree import ancestors
from specresearch.models.attention import Takeover, TreeMask
from specresearch.models.cache import LayerShape, SlotCache
from specresearch.models.fast import FastForward, View
from specresearch.models.graphs import Graphs
from specresearch.models.linear import quicken
from specresearch.parallel import Group, together
from specresearch.sampling import Sampler, forbid
from specresearch.types import Grammar, Kept, Step, Tap, Target, TargetOutput, Tree, UserError, Verdict

PREFILL_CHUNK = 512  # tokens of a prompt fed at once: bounds the mask and the activations of long prompts


class HFModel(Target):
    """Every pass is told its positions, its mask and the slots it writes; the wrapped model keeps no state of its own."""

    def __init__(self, model: Any, tokenizer: Any, name: str, fast: str = "auto", group: Group | None = None):
        """`group`: the ranks over which the weights are spread."""
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.group, self.number = group, group.register(self) if group is not None else 0
        quicken(model)  # a tree is a few rows
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        self.embedded = int(model.get_input_embeddings().weight.shape[0])
        config = model.config.get_text_config()
        self.context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.limits: list[tuple[int, str]] = []  # set by the probe: most tokens, and what happens beyond
        self.head = model.get_output_embeddings()
        self.blocks = _blocks(model, name)
        self.vocab_size = int(config.vocab_size)
        self.eos = _eos(model, tokenizer)
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.shapes = self._probe()
        self.cache: SlotCache | None = None
        self._keep: Tensor | None = None
        self._captured: dict[Tap, Tensor] | None = None
        self.takeover = Takeover(self.blocks)
        self.ours = False  # whether the tree kernel computes the attention of a pass: set by the check
        self._packed_only = False
        self.fast: FastForward | Graphs | None = None
        self._hook()
        self._choose(fast)

    @property
    def half(self) -> bool:
        """Whether half precision holds its matrices, though it computes in float32."""
        return bool(getattr(self.head, "holds_half", False))

    # -- the model as it is ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """Run two tokens through the model's own cache to see what a layer caches. Refuses what cannot be rolled back."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        kind = self.model.config.model_type
        try:
            output = self.model(input_ids=ids, use_cache=True)
        except Exception as fault:  # a modelling file may raise anything
            raise UserError(f"{self.name} ({kind}) fails on two tokens: {one_line(fault)}") from fault
        cache = getattr(output, self.cache_name, None)
        layers = getattr(cache, "layers", None)
        if not layers:
            raise UserError(f"{self.name} ({kind}) keeps no K/V cache, so rejected tokens could not be rolled back")
        for layer in layers:
            keys = getattr(layer, "keys", None)
            if (
                not isinstance(keys, Tensor)
                or keys.dim() != 4
                or keys.shape[2] != 2
                or hasattr(layer, "recurrent_states")
            ):
                raise UserError(f"{self.name} ({kind}) has layers with recurrent state, which cannot be rolled back")
        self.limits = _limits(self.model, layers)
        return [
            LayerShape(x.keys.shape[1], x.keys.shape[3], x.values.shape[3], x.keys.dtype, x.keys.device) for x in layers
        ]

    def _hook(self) -> None:
        """Two hooks stand in for a copied forward: the head sees only the rows asked for, the blocks give their stream.

        The modules may be another model's too (`first_layers`): hooks hold this one weakly, and go when it does.
        """
        ours = weakref.ref(self)

        def keep_rows(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            own = ours()
            if own is None or own._keep is None:
                return None
            return (args[0].gather(1, own._keep.to(args[0].device)[:, None, None].expand(-1, 1, args[0].shape[-1])),)

        def capture(tap: Tap, stream: Tensor) -> None:
            own = ours()
            if own is not None and own._captured is not None and tap in own._captured:
                own._captured[tap] = stream

        def after(tap: int) -> Any:
            return lambda _, args, output: capture(tap, output[0] if isinstance(output, tuple) else output)

        def before_head(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            capture("norm", args[0])

        def first(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            capture(0, args[0] if args else kwargs["hidden_states"])

        handles = [
            self.head.register_forward_pre_hook(before_head),
            self.head.register_forward_pre_hook(keep_rows),
            self.blocks[0].register_forward_pre_hook(first, with_kwargs=True),
            *(block.register_forward_hook(after(index + 1)) for index, block in enumerate(self.blocks)),
        ]
        weakref.finalize(self, _remove, handles).atexit = False

    def _choose(self, fast: str) -> None:
        """Our own forward where the model's family has one and it computes what the model's own does, else the model's."""
        if fast not in ("auto", "off"):
            raise UserError(f"fast={fast}: use auto or off")
        if fast == "auto" and FastForward.serves(self.model):
            forward = FastForward(self.model, self.blocks, self.head)
            self.fast = Graphs(forward) if self.device.type == "cuda" and self.group is None else forward
            try:
                return self._require_exact()
            except UserError:
                self.fast = None
        self._check()

    def _check(self) -> None:
        """Some architectures ignore explicit positions or masks. Compare tree passes with the plain forward, once.

        With our attention first, where the model's is transformers' SDPA, and with nothing but the packed mask, which any
        layer that does not ask ours stumbles over. A model that needs another attention keeps its own.
        """
        fault: BaseException | None = None
        if self.takeover.possible:
            try:
                self.ours = self._packed_only = True
                self._require_exact()
                self._packed_only = False
                if not self._on_kernel():
                    self._require_exact()
                return
            except Exception as error:
                fault = error
            self.ours = self._packed_only = False
        self._require_exact()
        if chosen() == "triton":
            why = one_line(fault.__cause__ or fault) if fault else "it is not transformers' sdpa"
            raise UserError(f"kernels=triton cannot compute the attention of {self.name} ({why}): use kernels=auto")

    def _require_exact(self) -> None:
        try:
            error, scale = self._error() if self.group is None else self.group.agree(self._error())
        except UserError:
            raise
        except Exception as fault:
            raise UserError(
                f"{self.name} ({self.model.config.model_type}) cannot run with explicit positions, a 4-D mask and the "
                f"slot cache: {type(fault).__name__}: {one_line(fault)}"
            ) from fault
        finally:
            self.cache = None
        eps = max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)  # float64 models do parts in float32
        bound = min(256 * eps, 0.1) * scale + 1e-6
        if error != error:
            raise UserError(f"the logits of {self.name} are NaN: its weights are broken, or its dtype is too narrow")
        if not error <= bound:
            raise UserError(
                f"{self.name} ({self.model.config.model_type}) does not follow explicit positions and a 4-D mask: "
                f"a tree pass differs from the plain one by {error:.2g} in the logits (rounding explains {bound:.2g})"
            )

    @torch.inference_mode()
    def _error(self) -> tuple[float, float]:
        """Two rows of 12 tokens, cut after 6 and 3 -> the largest difference of any logit, the largest logit."""
        order = torch.arange(12, device=self.device)
        chain = torch.stack([order * 7, order * 5 + 3]) % min(self.vocab_size, 101)
        plain = self.model(input_ids=chain).logits.double()
        length = torch.tensor([6, 3], device=self.device)
        self.reserve(2, 6, 12)
        first, _ = self.extend([0, 1], chain[:, :6], length, ())
        # The next six tokens, each followed by a decoy sibling that they must not see.
        place = length[:, None] + order // 2
        nodes = (chain.gather(1, place) + order % 2) % self.vocab_size
        mask = ((order % 2 == 0) & (order <= order[:, None])) | (order == order[:, None])
        logits, _ = self.run(nodes, place, length, mask.expand(2, -1, -1), 6)
        rows = torch.arange(2, device=self.device)
        error = torch.maximum(
            (first.double() - plain[rows, length - 1]).abs().max(),
            (logits[:, ::2].double() - plain[rows[:, None], place[:, ::2]]).abs().max(),
        )
        return float(error), float(plain.abs().max())

    @together
    def first_layers(self, count: int) -> HFModel:
        """The same model cut after `count` blocks, with the same norm and head; all weights are shared."""
        if type(count) is not int or not 1 <= count < len(self.blocks):
            raise UserError(f"drafter.layers={count}: {self.name} has {len(self.blocks)} layers, use 1 to one less")
        model, base = _shallow(self.model), _shallow(self.model.base_model)
        name = next(n for n, m in self.model.base_model.named_children() if m is self.blocks)
        base._modules[name] = nn.ModuleList(list(self.blocks)[:count])
        model._modules[self.model.base_model_prefix] = base
        model.config = base.config = copy.deepcopy(self.model.config)
        text = model.config.get_text_config()
        text.num_hidden_layers = count
        if isinstance(getattr(text, "layer_types", None), list):
            text.layer_types = text.layer_types[:count]  # a cache is made with as many layers as these
        return type(self)(model, self.tokenizer, f"{self.name}[:{count}]", "auto" if self.fast else "off", self.group)

    # -- the target's role -------------------------------------------------------------------------------------------

    @together
    def reserve(self, batch: int, capacity: int, tree_size: int) -> None:
        """Slots for `batch` rows of `capacity` tokens, and `tree_size` more for nodes that are not committed yet."""
        if self.fast is not None:
            self.fast.follow()
        slots = capacity + tree_size
        for most, why in self.limits:
            if slots > most:
                raise UserError(
                    f"{self.name} {why} and {slots} are needed, so rejected tokens could not be rolled back: "
                    "use shorter prompts or a smaller max_new_tokens"
                )
        if self.cache is None or self.cache.batch != batch or self.cache.slots < slots:
            self.cache = None  # free the old one first
            self.cache = SlotCache(self.shapes, batch, slots)

    @together
    def release(self) -> None:
        self.cache = None

    def kept(self) -> Kept | None:
        if not isinstance(self.fast, Graphs) or not self.fast.works or self.cache is None:
            return None
        return Kept(fixed=(self.cache, self.fast.forward.stack))

    def fingerprint(self) -> str:
        """Sixty-four elements of every tensor, and how they are computed with: cheap, and no two models share it."""
        digest = hashlib.sha256(f"{self.device} {self.dtype} {self.eos}".encode())
        for name, weight in self.model.named_parameters():
            flat = weight.detach().flatten()
            some = flat[:: max(flat.numel() // 64, 1)][:64].contiguous().cpu()
            digest.update(f"{name} {tuple(weight.shape)}".encode() + some.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @together
    @torch.inference_mode()
    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: Tensor,
        mask: Tensor,
        extent: int,
        *,
        start: int = 0,
        rows: Sequence[int] | None = None,
        keep: Tensor | None = None,
        taps: Sequence[Tap] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over `tokens` [R, q] at `positions` [R, q], written `start` slots behind the `length` [R] cached ones.

        Query i sees the whole prefix, and those of the start + q slots behind it that `mask` [R, q, start + q] allows.
        `extent` >= every length, known to the host. `rows` = the cache rows meant, all if None. `keep` [R] = the one
        query per row whose logits are wanted. -> logits [R, q or 1, V], the taps' features [R, q, F].
        """
        assert self.cache is not None
        cache, (count, width) = self.cache, tokens.shape
        visible = extent + start + width
        at = torch.arange(count, device=self.device) if rows is None else torch.tensor(rows, device=self.device)
        slots = (at * cache.slots + length + start)[:, None] + torch.arange(width, device=self.device)
        cache.aim(slots.flatten(), rows, visible)
        tokens = tokens.clamp(max=self.embedded - 1)  # a draft model may lack the target's padded ids
        positions = positions.clamp(max=self.context - 1)  # nodes past the context are never emitted
        if self.fast is not None:
            return self.fast(tokens, positions, cache, self._view(length, mask, visible), keep, taps)
        self._keep, self._captured = keep, dict.fromkeys(taps) if taps else None  # type: ignore[assignment]
        kwargs = {self.cache_name: cache, "use_cache": True, **self._masks(length, mask, visible)}
        try:
            with self.takeover() if self.ours else nullcontext():
                logits = self.model(input_ids=tokens, position_ids=positions, **kwargs).logits
            captured = self._captured
        finally:
            self._keep = self._captured = None
        if not captured:
            return logits, None
        return logits, torch.cat([captured[tap].to(self.device) for tap in taps], -1)

    def _on_kernel(self) -> bool:
        width = max(self.shapes[0].key_width, self.shapes[0].value_width)
        return serves(self.model.get_input_embeddings().weight, width)

    def _view(self, length: Tensor, mask: Tensor, visible: int) -> View:
        if self._on_kernel():
            return View(pack_words(mask), length, None)
        return View(None, length, additive(mask, length, visible, self.dtype))

    def _masks(self, length: Tensor, mask: Tensor, visible: int) -> dict[str, Any]:
        """The keywords that tell a pass what its queries see: packed for the tree kernel, else one 4-D mask for all layers.

        That one is additive, since transformers' eager attention reads a bool mask as numbers (it adds 1 where it should
        block). Beside a packed mask it has no columns, and any attention but ours fails on it.
        """
        if self.ours and (self._packed_only or self._on_kernel()):
            empty = torch.zeros(*mask.shape[:1], 1, mask.shape[1], 0, dtype=self.dtype, device=self.device)
            return {"attention_mask": empty, "tree": TreeMask(pack_words(mask), length)}
        dense = additive(mask, length, visible, self.dtype, torch.finfo(self.dtype).min)
        return {"attention_mask": dense} | ({"tree": TreeMask(None, length)} if self.ours else {})

    @together
    def extend(
        self, rows: Sequence[int], tokens: Tensor, length: Tensor, taps: Sequence[Tap]
    ) -> tuple[Tensor, Tensor | None]:
        if self.fast is not None:
            self.fast.follow()
        largest = int(tokens.max())
        if largest >= self.embedded:
            raise UserError(
                f"the prompt has token {largest} and {self.name} embeds {self.embedded}: "
                "its tokenizer belongs to another model"
            )
        last, features = None, []
        for begin in range(0, tokens.shape[1], PREFILL_CHUNK):
            chunk = tokens[:, begin : begin + PREFILL_CHUNK]
            width = chunk.shape[1]
            positions = torch.arange(begin, begin + width, device=self.device).expand(len(rows), -1)
            causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril().expand(len(rows), -1, -1)
            end = length - 1 - begin
            before = torch.full_like(length, begin)
            keep = end.clamp(0, width - 1)
            logits, feature = self.run(chunk, positions, before, causal, begin, rows=rows, keep=keep, taps=taps)
            here = ((end >= 0) & (end < width))[:, None]
            last = logits[:, 0] if last is None else torch.where(here, logits[:, 0], last)
            features.append(feature)
        assert last is not None
        return last, torch.cat(features, 1) if taps else None  # type: ignore[arg-type]

    @together
    def forward(self, step: Step, tree: Tree, taps: Sequence[Tap]) -> TargetOutput:
        positions = step.length[:, None] + tree.depth
        mask = ancestors(tree.parent)
        logits, features = self.run(tree.tokens, positions, step.length, mask, step.extent, taps=taps)
        return TargetOutput(logits, features)

    @together
    def commit(self, step: Step, verdict: Verdict) -> None:
        if verdict.path.shape[1] == 1:
            return  # the root already lies where it belongs
        assert self.cache is not None
        path = verdict.path[:, 1:]
        place = torch.arange(1, path.shape[1] + 1, device=path.device)
        base = (torch.arange(path.shape[0], device=path.device) * self.cache.slots + step.length)[:, None]
        self.cache.move(base + torch.where(path >= 0, path, place), base + place)

    @together
    @torch.inference_mode()
    def plain(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits [R, K, V] after the tokens at `places` [K] of `tokens` [R, T], by the model's own forward; the head computes
        those rows alone where the model lets one choose."""
        if not self.chooses:
            return self.model(input_ids=tokens, use_cache=False).logits[:, places]
        return self.model(input_ids=tokens, use_cache=False, logits_to_keep=places).logits

    @together
    @torch.inference_mode()
    def reference(self, tokens: list[int], positions: list[int], one_by_one: bool = False) -> Tensor:
        """Logits [len(positions), V] after the tokens at `positions`, by the model's own forward, cache, mask and positions:
        nothing of this adapter takes part. All at once, or with the last len(positions) tokens fed one by one."""
        ids = torch.tensor([tokens], device=self.device)
        if not one_by_one:
            return self.model(input_ids=ids, use_cache=False).logits[0, positions]
        start, rows, cache = min(positions), [], None
        for begin, end in [(0, start), *((i, i + 1) for i in range(start, max(positions) + 1))]:
            if begin == end:
                continue
            output = self.model(
                input_ids=ids[:, begin:end], use_cache=True, **({self.cache_name: cache} if cache else {})
            )
            cache = getattr(output, self.cache_name)
            if begin in positions:
                rows.append(output.logits[0, -1])
        return torch.stack(rows)

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], budget: int, sampler: Sampler, stop: Sequence[str], **extra: Any
    ) -> list[int]:
        """transformers' own `generate` under the same settings: the outside baseline. `extra`: its assisted modes."""
        if self.group is not None:
            raise UserError("transformers' generate decides on each rank by itself: use baseline=true with target.tp")
        kwargs: dict[str, Any] = {"do_sample": sampler.temperature > 0, **extra}
        if sampler.temperature > 0:
            kwargs |= {"temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p}
            kwargs |= {"min_p": sampler.min_p or None}
        if sampler.logit_bias:
            kwargs["sequence_bias"] = {(token,): bias for token, bias in sampler.logit_bias.items()}
        if sampler.grammar is not None:
            kwargs["logits_processor"] = LogitsProcessorList([Constrained(sampler.grammar, len(prompt))])
        if stop:
            kwargs |= {"stop_strings": list(stop), "tokenizer": self.tokenizer}
        ids = torch.tensor([prompt], device=self.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=budget,
            repetition_penalty=sampler.repetition_penalty,
            eos_token_id=list(self.eos) or None,
            pad_token_id=self.eos[0] if self.eos else 0,
            **kwargs,
        )
        return output[0, len(prompt) :].tolist()

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that waits for an answer, by the model's chat template if it has one."""
        if self.tokenizer is None:
            raise UserError(f"{self.name} comes without a tokenizer, so text prompts cannot be read")
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer("\n".join(m["content"] for m in messages)).input_ids)
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as fault:  # a template is a program of the model's author
            raise UserError(f"the chat template of {self.name} refuses this prompt: {one_line(fault)}") from fault
        ids = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        if not ids:
            raise UserError(f"the chat template of {self.name} makes an empty prompt of this")
        return ids

    def text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in text.split()] if self.tokenizer is None else list(self.tokenizer(text).input_ids)

    def seconds(self, nodes: int, prefix: int = 64) -> float:
        """Median time of a pass over `nodes` tokens behind `prefix` cached ones, one row; the cache's content is lost."""
        self.reserve(1, prefix, max(nodes, 64))
        zeros = torch.zeros(1, nodes, dtype=torch.long, device=self.device)
        mask = torch.ones(1, nodes, nodes, dtype=torch.bool, device=self.device).tril()
        length, times = torch.tensor([prefix], device=self.device), []
        for _ in range(6):
            began = time.perf_counter()
            self.run(zeros, prefix + torch.arange(nodes, device=self.device)[None], length, mask, prefix)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


class Constrained(LogitsProcessor):  # type: ignore[misc]
    """The grammar in transformers' `generate`, for one answer; its assisted modes go back and forth between prefixes."""

    def __init__(self, grammar: Grammar, start: int):
        self.grammar, self.start, self.walk = grammar, start, Walk(grammar.matcher())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allow = torch.full((1, words_of(self.grammar.vocab_size)), -1, dtype=torch.int32)
        if self.walk.to(input_ids[0, self.start :].tolist()) and not self.walk.matcher.terminated:
            self.walk.matcher.fill(allow, 0)
        return forbid(scores, allow.to(scores.device))


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _limits(model: Any, layers: Sequence[Any]) -> list[tuple[int, str]]:
    """Lengths beyond which a cached token is forgotten, or would have had another key -> most tokens, and why."""
    config = model.config.get_text_config()
    windows = [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo and Doge have windows that no cache shows
        windows.append(config.window_size)
    windows.append(getattr(config, "keep_window_size", None))
    limits = [(int(w), f"has a sliding window of {w} tokens") for w in windows if w]
    if any("longrope" in str(getattr(module, "rope_type", "")) for module in model.modules()):
        rope = config.rope_parameters
        each = [r for r in (rope, *rope.values()) if isinstance(r, dict) and "original_max_position_embeddings" in r]
        most = min(int(r["original_max_position_embeddings"]) for r in each)
        limits.append((most, f"changes its rotary frequencies after {most} tokens"))
    return sorted(limits)[:1]


def _blocks(model: Any, name: str) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for child in model.base_model.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UserError(
        f"{name} ({model.config.model_type}): no list of {count} transformer blocks directly below the base model; "
        "such a layout is not supported"
    )


def _shallow(module: Any) -> Any:
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


def _eos(model: Any, tokenizer: Any) -> tuple[int, ...]:
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = own if isinstance(own, list) else [own]
    return tuple(sorted({int(i) for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None}))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
