"""The embedded engine: transformers on the CPU or one GPU, no server.

Batched generation, states of stored ids, and the single-request passes that decode.py drives. All that is known of
transformers is here: the cache, the argument names, where the layers are.

B rows, T tokens, L aux layers, D target width, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.drafter import linear
from eyas.drafter.decode import Pass
from eyas.drafter.sampling import pick, probabilities
from eyas.errors import SurroundingsError, UsageError
from eyas.target import Decision, Target

NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
COMPACT_AT = 0.25  # rebuild the batch when this share of it has finished: a copy costs a fraction of a step


def choose_device() -> Decision:
    if torch.cuda.is_available():
        return Decision("cuda", torch.cuda.get_device_name())
    return Decision("cpu", f"no CUDA; {torch.get_num_threads()} threads")


def choose_dtype(wanted: str, device: str) -> Decision:
    """The type that the target computes in. `auto`: bfloat16 where it is multiplied natively."""
    if wanted != "auto":
        return Decision(wanted, "the recipe says so")
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return Decision("bfloat16" if native else "float32", f"CUDA {'with' if native else 'without'} bf16")
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.is_file() else set()
    if words & NATIVE_BF16_FLAGS:
        return Decision("bfloat16", "this CPU multiplies bfloat16 natively")
    return Decision(
        "float32", "this CPU has no bfloat16 instructions: batches would run several times slower"
    )


class BufferLayer(CacheLayerMixin):
    """One layer's keys and values in a buffer of fixed capacity: appending copies only what is new, forgetting is a
    smaller length."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(x: Tensor) -> Tensor:
            return x.new_empty(*x.shape[:2], self.capacity, x.shape[3])

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class Answer(NamedTuple):
    ids: list[int]
    finish_reason: str  # "stop" or "length"


class Seen(NamedTuple):
    """What one pass over a batch of ids leaves, on the engine's device; positions past a row's end mean nothing."""

    aux_BTLD: Tensor
    last_BTD: Tensor
    top1_BT: Tensor  # the target's own argmax after each position
    gap_BT: Tensor  # its log-probability minus that of the second
    ulp_BT: Tensor  # the step between neighbouring logits of that size, in the type of the logits
    again_BT: Tensor  # argmax of the target's own norm and head over the last states, same shapes: bit for bit the same
    outside_BT: Tensor  # argmax by the caller's own norm and head, or again
    finite_BT: Tensor


class HFEngine:
    """A loaded target. Aux states are taken by hooks only while `capturing`."""

    def __init__(
        self, target: Target, dtype: str, device: str, aux_layers: Sequence[int], remote_code: bool = False
    ) -> None:
        self.target, self.device, self.stop_ids = target, device, target.stop_ids
        self.aux_layers = list(aux_layers)
        self.model = _load(target, dtype, device, remote_code)
        linear.swap(self.model)
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._captured: dict[int, Tensor] = {}
        self._wanted: set[int] = set()
        self._hook()

    def _hook(self) -> None:
        decoder = self.model.get_decoder()
        spots: list[Any] = [*decoder.layers, decoder.norm]  # id n is the input of the final norm
        for i in sorted({*self.aux_layers, len(spots) - 1}):
            spots[i].register_forward_pre_hook(self._taker(i), with_kwargs=True)

    def _taker(self, i: int) -> Callable[..., None]:
        def take(module: Any, args: tuple, kwargs: dict) -> None:
            if i in self._wanted:
                self._captured[i] = args[0] if args else kwargs["hidden_states"]

        return take

    def _forward(self, ids_BT: Tensor, capture: set[int] | None = None, **kwargs: Any) -> Tensor:
        self._wanted, self._captured = capture or set(), {}
        try:
            return self.model(input_ids=ids_BT, **kwargs).logits
        finally:
            self._wanted = set()

    def _aux(self) -> Tensor:
        return torch.stack([self._captured[i] for i in self.aux_layers], -2)

    # ---- one request: the DecodingTarget of decode.py ----

    def new_cache(self, capacity: int) -> Cache:
        return Cache(layers=[BufferLayer(capacity) for _ in range(self.target.layers)])

    def step(self, ids: list[int], cache: Cache, last_only: bool, aux: bool) -> Pass:
        logits = self._forward(
            torch.tensor([ids], device=self.device),
            set(self.aux_layers) if aux else None,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self._cache_name: cache},
        )
        return Pass(logits[0], self._aux()[0] if aux else None)

    def forget(self, cache: Cache, tokens: int) -> None:
        for layer in _buffers(cache):
            layer.length -= tokens

    # ---- batches ----

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: list[float],
        top_p: float,
        uniforms: list[np.ndarray],
        stop_ids: tuple[int, ...] | None = None,
    ) -> list[Answer]:
        """Answer prompts of similar length together; finished rows leave the batch.

        uniforms: each row's own random numbers, one per token, so that its answer does not depend on its neighbours.
        """
        stops = set(self.stop_ids if stop_ids is None else stop_ids)
        longest = max(map(len, prompts))
        pad = [longest - len(p) for p in prompts]
        ids = torch.tensor([[0] * n + p for n, p in zip(pad, prompts, strict=True)], device=self.device)
        mask = torch.zeros(len(prompts), longest + max_tokens, dtype=torch.long, device=self.device)
        for i, n in enumerate(pad):
            mask[i, n:] = 1
        padded = any(pad)
        first = torch.tensor(pad, device=self.device)
        heat = torch.tensor(temperature, device=self.device)
        noise = torch.from_numpy(np.stack(uniforms)).to(self.device)
        rows = list(range(len(prompts)))
        out: list[list[int]] = [[] for _ in prompts]
        cache = self.new_cache(longest + max_tokens)
        at = longest
        positions = (torch.arange(longest, device=self.device)[None] - first[:, None]).clamp_min(0)
        for n in range(max_tokens):
            seen: dict[str, Any] = {
                self._cache_name: cache,
                "attention_mask": mask[:, :at] if padded else None,
            }
            logits = self._forward(ids, use_cache=True, logits_to_keep=1, position_ids=positions, **seen)[
                :, -1
            ]
            token = _choose(logits, heat, top_p, noise[:, n])
            done = []
            for i, t in enumerate(token.tolist()):
                answer = out[rows[i]]
                if not (answer and answer[-1] in stops):
                    answer.append(t)
                done.append(answer[-1] in stops)
            if all(done):
                break
            if sum(done) >= COMPACT_AT * len(done):
                stay = torch.tensor([i for i, d in enumerate(done) if not d], device=self.device)
                rows = [rows[i] for i in stay.tolist()]
                token, heat, noise, first, mask = (
                    token[stay],
                    heat[stay],
                    noise[stay],
                    first[stay],
                    mask[stay],
                )
                for layer in _buffers(cache):
                    layer.keep(stay)
            ids, positions = token[:, None], (at - first)[:, None]
            at += 1
        return [Answer(row, "stop" if row[-1] in stops else "length") for row in out]

    @torch.inference_mode()
    def states(self, rows: Sequence[list[int]], outside: Callable[[Tensor], Tensor] | None = None) -> Seen:
        """One pass over rows of similar length (padded at the right, which causal attention never sees).

        outside: last states [B, T, D] to logits, by weights that were not loaded by this engine.
        """
        longest = max(map(len, rows))
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows], device=self.device)
        n = self.target.layers
        logits = self._forward(ids, {*self.aux_layers, n}, use_cache=False)
        aux, last = self._aux(), self._captured[n]
        again = self._own_argmax(last) if logits.dtype != torch.float32 or outside is None else None
        theirs = outside(last).argmax(-1) if outside else again
        top1 = logits.argmax(-1, keepdim=True)
        best = logits.gather(-1, top1)[..., 0].float()
        second = logits.scatter_(-1, top1, float("-inf")).amax(-1).float()
        finite = aux.flatten(2).isfinite().all(-1) & last.isfinite().all(-1)
        ulp = best.abs().clamp_min(1e-6).log2().floor().exp2() * torch.finfo(logits.dtype).eps
        again = theirs if again is None else again
        assert again is not None and theirs is not None
        return Seen(aux, last, top1[..., 0], best - second, ulp, again, theirs, finite)

    def _own_argmax(self, last_BTD: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(self.model.get_decoder().norm(last_BTD)).argmax(-1)


def _buffers(cache: Cache) -> list[BufferLayer]:
    return cast(list[BufferLayer], cache.layers)


def _choose(logits_BV: Tensor, heat_B: Tensor, top_p: float, uniform_B: Tensor) -> Tensor:
    """Argmax where the temperature is 0, a sample elsewhere."""
    best = logits_BV.argmax(-1)
    hot = heat_B > 0
    if not bool(hot.any()):
        return best
    sampled = pick(probabilities(logits_BV, heat_B.clamp_min(1e-6)[:, None], top_p), uniform_B)
    return torch.where(hot, sampled, best)


def _load(target: Target, dtype: str, device: str, remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"trust_remote_code": remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(target.folder, **where)
        known = [
            a for a in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(config) in a._model_mapping
        ]
        kind = (known or [AutoModelForCausalLM])[0]  # of a model that sees, the language model is asked alone
        model: Any = kind.from_pretrained(target.folder, dtype=getattr(torch, dtype), **where)
    except (ValueError, KeyError, ImportError, OSError) as e:
        raise UsageError(
            f"{target.folder}: transformers cannot load this model (model_type {target.model_type}): "
            f"{' '.join(str(e).split())[:300]}"
        ) from e
    if len(model.get_decoder().layers) != target.layers:
        raise UsageError(
            f"{target.folder}: {len(model.get_decoder().layers)} layers loaded, config.json says {target.layers}."
        )
    kinds = set(target.config.get("layer_types") or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise UsageError(
            f"{target.folder}: layers of type {', '.join(sorted(kinds))} are not supported by the embedded engine."
        )
    try:
        return model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as e:
        raise SurroundingsError(f"{target.folder} does not fit into the GPU's memory ({e}).") from e
