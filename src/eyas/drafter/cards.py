"""The card of any drafter's folder: every field of contract.FIELDS with its value and what states it, or what it follows from.

Unknown is never guessed. Sources of what trainers do where nothing is stated: drafter/dialects.py.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from eyas.contract import FIELDS, Card, Fact, Rope, scaling_of
from eyas.drafter.dialects import IDS, LATENT_KEYS, Folder, recognise, shift_of


class Reading(NamedTuple):
    """What a folder says."""

    dialect: str
    reason: str
    card: Card


def read(folder: Folder) -> Reading:
    """The folder's card. Raises ContractError for what is no EAGLE-3 drafter."""
    dialect, reason = recognise(folder)
    c = _Cards(folder, dialect)
    card = {name: getattr(c, name)() for name in FIELDS}
    return Reading(dialect, reason, card)


def rope_of(config: Mapping[str, Any]) -> tuple[Rope | None, str]:
    """Rope as a config's own keys say it, and where; None with the contradiction where they disagree."""
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    dicts = [d for d in (scaling, parameters) if isinstance(d, dict)]
    thetas = [config["rope_theta"]] if config.get("rope_theta") is not None else []
    thetas += [d["rope_theta"] for d in dicts if d.get("rope_theta") is not None]
    if not all(isinstance(t, int | float) and not isinstance(t, bool) and t > 0 for t in thetas):
        return None, f"rope_theta is {thetas!r:.80}"
    if len({float(t) for t in thetas}) > 1:
        return None, f"rope_theta is said twice and differs: {', '.join(f'{t:g}' for t in thetas)}"
    kinds = [scaling_of(d) for d in dicts]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        return None, "rope_scaling and rope_parameters differ"
    partials = [
        d["partial_rotary_factor"] for d in (config, *dicts) if d.get("partial_rotary_factor") is not None
    ]
    if not all(isinstance(p, int | float) and not isinstance(p, bool) and 0 < p <= 1 for p in partials):
        return None, f"partial_rotary_factor is {partials!r:.80}"
    theta = float(thetas[0]) if thetas else 10000.0
    said = "rope_theta" if thetas else "no rope_theta: every reader takes 10000"
    return Rope(theta, kinds[0] if kinds else (), float(partials[0]) if partials else 1.0), said


def latent_of(config: Mapping[str, Any]) -> Fact:
    """Ranks and widths of latent attention; unknown where one is not stated."""
    values = tuple(config.get(key) for key in LATENT_KEYS)
    lacking = [key for key, value in zip(LATENT_KEYS, values, strict=True) if not whole(value)]
    return (
        unknown(f"{', '.join(lacking)} not stated") if lacking else stated(values, "kv_lora_rank and others")
    )


def whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40


def ids_of(value: Any) -> tuple[int, ...] | None:
    """A list of layer ids, or None for what is none."""
    good = isinstance(value, list) and value and all(type(i) is int and -1 <= i < 10_000 for i in value)
    return tuple(value) if good else None


def stated(value: Any, where: str) -> Fact:
    return Fact(value, "stated", where)


def derived(value: Any, why: str) -> Fact:
    return Fact(value, "derived", why)


def unknown(why: str) -> Fact:
    return Fact(None, "unknown", why)


class _Cards:
    """One method for each field of the card."""

    def __init__(self, folder: Folder, dialect: str) -> None:
        self.folder, self.dialect = folder, dialect
        self.flat, self.nested, self.target = folder.flat, folder.nested, folder.target
        self.names = folder.names()

    def _number(self, key: str, follows: Callable[[], tuple[int | None, str]]) -> Fact:
        value = self.flat.get(key)
        if whole(value):
            return stated(value, key)
        if value is not None:
            return unknown(f"{key} is {value!r:.60}")
        found, why = follows()
        return derived(found, why) if found else unknown(f"{key} is not stated, and {why}")

    def _rows(self, name: str, axis: int = 0) -> tuple[int | None, str]:
        shape = self.folder.shape(name)
        return (
            (shape[axis], f"shape of {name}")
            if shape and len(shape) > axis
            else (None, f"there is no {name}")
        )

    def architecture(self) -> Fact:
        if "midlayer.self_attn.kv_a_proj_with_mqa.weight" in self.names or self.flat.get("kv_lora_rank"):
            return derived("mla", "kv_lora_rank, or a tensor of latent attention")
        return derived("llama", "tensors")

    def depth(self) -> Fact:
        numbers = [int(m[1]) for n in self.names if (m := re.match(r"layers\.(\d{1,4})\.", n))]
        first = any(n.startswith("midlayer.") for n in self.names)
        return self._number(
            "num_hidden_layers",
            lambda: (max(numbers, default=0) + 1 if first else None, "names of the tensors"),
        )

    def target_layers(self) -> Fact:
        return (
            stated(self.target.layers, "the target's config")
            if self.target
            else unknown("no target is given")
        )

    def aux_layers(self) -> Fact:
        own, nested = self.flat.get(IDS), self.nested.get(IDS)
        for key, value in ((IDS, own), (f"eagle_config.{IDS}", nested)):
            if value is not None and ids_of(value) is None:
                return unknown(f"{key} is {value!r:.60}, not a list of layer ids")
        if self.dialect in ("vllm", "speculators") and own is not None:
            return stated(tuple(sorted(own)), IDS)
        if self.dialect == "modelopt" and nested is not None:
            return derived(
                tuple(sorted(i + 1 for i in nested)), f"eagle_config.{IDS} + 1: outputs of layers in ModelOpt"
            )
        if nested is not None:
            shift = shift_of(nested, self.target)
            if shift is None:
                return unknown(
                    f"SGLang reads eagle_config.{IDS} {nested} by the target's class: give --target"
                )
            why = "" if shift else " as they are (this target's class in SGLang)"
            return derived(
                tuple(sorted(i + shift for i in nested)), f"eagle_config.{IDS}{' + 1' if shift else why}"
            )
        if self.dialect in ("speculators", "eagle"):
            if self.target is None:
                return unknown(
                    "not stated; the trainer's default depends on the number of target layers: give --target"
                )
            n = self.target.layers
            return derived((2, n // 2, n - 3), f"not stated: the trainer's default for {n} layers")
        return unknown("not stated anywhere: what it was trained on cannot be seen")

    def fc_norm(self) -> Fact:
        kinds = [
            k
            for k, there in (
                ("chunks", "fc_norm.0.weight" in self.names),
                ("whole", "input_norm.weight" in self.names),
            )
            if there
        ]
        if len(kinds) > 1:
            return unknown("there are tensors of both kinds, fc_norm.* and input_norm")
        return derived(kinds[0] if kinds else "none", "tensors")

    def before_residual(self) -> Fact:
        value = self.flat.get("norm_before_residual")
        if isinstance(value, bool):
            return stated(value, "norm_before_residual")
        if value is not None:
            return unknown(f"norm_before_residual is {value!r:.60}")
        if self.dialect == "speculators":
            return unknown(
                "norm_before_residual is not stated: speculators' class takes false, its command line and vLLM true"
            )
        return derived(False, "not stated: false in a flat config, everywhere")

    def fed_back(self) -> Fact:
        value = self.flat.get("norm_output")
        if value not in (None, True, False):
            return unknown(f"norm_output is {value!r:.60}")
        if self.dialect in ("eagle", "modelopt"):
            return derived("hidden", "this trainer has nothing else")
        if value and self.dialect == "sglang":
            return unknown(
                "norm_output is true: before September 2026 SpecForge meant a norm before the head by it, and fed the un-normed state back"
            )
        if value is None:
            return derived("hidden", "norm_output is not stated: false, everywhere")
        return stated("normed" if value else "hidden", "norm_output")

    def hidden(self) -> Fact:
        return self._number("hidden_size", lambda: self._rows("fc.weight"))

    def target_hidden(self) -> Fact:
        value = self.flat.get("target_hidden_size")
        if value is not None:
            return (
                stated(value, "target_hidden_size")
                if whole(value)
                else unknown(f"target_hidden_size is {value!r:.60}")
            )
        hidden = self.hidden()
        return (
            derived(hidden.value, "no target_hidden_size: the drafter's own width")
            if hidden.known
            else hidden
        )

    def mlp(self) -> Fact:
        return self._number("intermediate_size", lambda: self._rows("midlayer.mlp.gate_proj.weight"))

    def heads(self) -> Fact:
        return self._number("num_attention_heads", lambda: (None, "shapes do not tell"))

    def kv_heads(self) -> Fact:
        heads = self.heads()
        return self._number(
            "num_key_value_heads", lambda: (heads.value, "not stated: as many as attention heads")
        )

    def head_dim(self) -> Fact:
        if self.architecture().value == "mla":
            value = self.flat.get("v_head_dim")
            return stated(value, "v_head_dim") if whole(value) else unknown("v_head_dim is not stated")
        heads, rows = self.heads(), self._rows("midlayer.self_attn.q_proj.weight")[0]
        return self._number(
            "head_dim",
            lambda: (
                rows // heads.value if rows and heads.known else None,
                "shape of q_proj by num_attention_heads",
            ),
        )

    def latent(self) -> Fact:
        if self.architecture().value != "mla":
            return derived(None, "its attention is not latent")
        return latent_of(self.flat)

    def qk_norm(self) -> Fact:
        return derived("midlayer.self_attn.q_norm.weight" in self.names, "tensors")

    def bias(self) -> Fact:
        return derived("midlayer.self_attn.q_proj.bias" in self.names, "tensors")

    def activation(self) -> Fact:
        value = self.flat.get("hidden_act")
        return (
            stated(value, "hidden_act")
            if isinstance(value, str)
            else derived("silu", "hidden_act is not stated: silu, everywhere")
        )

    def eps(self) -> Fact:
        value = self.flat.get("rms_norm_eps")
        if value is None:
            return derived(1e-6, "rms_norm_eps is not stated: 1e-6, everywhere")
        good = isinstance(value, float) and 0 < value < 1
        return stated(value, "rms_norm_eps") if good else unknown(f"rms_norm_eps is {value!r:.60}")

    def rope(self) -> Fact:
        found, said = rope_of(self.flat)
        if found is None:
            return unknown(said)
        if (
            "no rope_theta" in said
            and self.flat.get("model_type") == "qwen3"
            and self.dialect == "speculators"
        ):
            return unknown("no rope_theta in a qwen3 layer: transformers takes 10000, vLLM 1e6")
        return stated(found, said) if said == "rope_theta" else derived(found, said)

    def window(self) -> Fact:
        kinds, size = self.flat.get("layer_types"), self.flat.get("sliding_window")
        if isinstance(kinds, list) and "sliding_attention" in kinds and size:
            return stated(size, "layer_types and sliding_window")
        return derived(None, "no layer of layer_types slides")

    def context(self) -> Fact:
        return self._number("max_position_embeddings", lambda: (None, "readers take 2048 or their own"))

    def trained_length(self) -> Fact:
        return unknown("no folder but eyas's states it")

    def vocab(self) -> Fact:
        return self._number(
            "vocab_size",
            lambda: self._rows("t2d") if "t2d" in self.names else self._rows("embed_tokens.weight"),
        )

    def draft_vocab(self) -> Fact:
        return self._number("draft_vocab_size", lambda: self._rows("lm_head.weight"))

    def map(self) -> Fact:
        small, large = self.draft_vocab(), self.vocab()
        if small.known and small.value == large.value:
            return derived("all", "the whole vocabulary is drafted")
        if "d2t" in self.names:
            return derived("offsets", "d2t")
        return unknown("there is no d2t, and the vocabulary is a reduced one")

    def head(self) -> Fact:
        return derived("own" if "lm_head.weight" in self.names else "target", "tensors")

    def embedding(self) -> Fact:
        return derived("own" if "embed_tokens.weight" in self.names else "target", "tensors")

    def dtype(self) -> Fact:
        found = self.names.get("fc.weight")
        kinds = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        kind = self.folder.tensors[found].dtype if found else ""
        return (
            derived(kinds.get(kind, kind), "type of fc.weight") if found else unknown("there is no fc.weight")
        )

    def quantisation(self) -> Fact:
        about = self.flat.get("quantization_config")
        if isinstance(about, dict):
            return stated(str(about.get("quant_method", "unnamed")), "quantization_config")
        scales = [n for n in self.names if n.endswith(("_scale", "_scale_inv", "qweight", "weight_packed"))]
        return derived(scales[0] if scales else None, f"a tensor {scales[0]}" if scales else "tensors")
