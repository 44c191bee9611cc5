"""The dialects in which trainers and engines write a drafter: how each is recognised, its names, and its config written from a card.

    vllm         flat config, aux layers at the top level (id i = input of layer i), flags as vLLM means them; what eyas writes
    sglang       flat config, aux layers in eagle_config, numbered as SGLang's class of the target reads them; SpecForge
    speculators  nested transformer_layer_config, layers.0.*
    eagle        SafeAILab EAGLE: flat, no aux layers, no rope; its code has them fixed
    modelopt     NVIDIA ModelOpt: flat, eagle_config with outputs of layers (id + 1 is ours), d2t without t2d

drafter/cards.py reads a folder of any of them. Sources: speculators 0.9.0 models/eagle3/config.py,
SpecForge 0.2.0 modeling/draft/llama3_eagle.py, EAGLE traineagle3/cnets.py, ModelOpt 0.47.0 export/plugins/hf_spec_configs.py.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from eyas.contract import FIELDS, Card, Rope
from eyas.errors import ContractError
from eyas.target import Target

NAMES = ("vllm", "sglang", "speculators", "eagle", "modelopt")
IDS = "eagle_aux_hidden_state_layer_ids"
DEEPSEEK = {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "kimi_k25",
    "glm_moe_dsa",
    "glm4_moe_lite",
}
LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)  # in the order of contract.Latent
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEVER_SAVED = (
    "verifier_lm_head.",
    "verifier_norm.",
    "target_model.",
)  # of the target, leaked into a drafter's file


WHOLE, REAL = "a whole number above 0", "a number"
KINDS = {
    **dict.fromkeys(
        (
            "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "num_hidden_layers", "vocab_size", "draft_vocab_size", "max_position_embeddings", "num_aux_hidden_states", "v_head_dim",
            "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "sliding_window",
        ),
        WHOLE,
    ),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), REAL),
    **dict.fromkeys(
        (
            "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "tie_word_embeddings", "attention_bias",
            "use_aux_hidden_state",
        ),
        "true or false",
    ),
    **dict.fromkeys(("model_type", "hidden_act", "speculators_model_type"), "a word"),
    **dict.fromkeys(("architectures", "layer_types", IDS, "layer_ids"), "a list"),
    **dict.fromkeys(
        ("eagle_config", "rope_scaling", "rope_parameters", "transformer_layer_config", "speculators_config", "quantization_config"), "an object",
    ),
}  # fmt: skip


def is_a(kind: str, value: Any) -> bool:
    """Whether a JSON value is of a kind of KINDS; null is of any."""
    if value is None:
        return True
    if kind == WHOLE:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40
    if kind == REAL:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
    types = {"true or false": bool, "a word": str, "a list": list, "an object": dict}
    return isinstance(value, types[kind])


def misplaced(config: Mapping[str, Any], where: str = "") -> list[tuple[str, Any, str]]:
    """Keys whose value is of another kind than every reader expects: the key with its place, the value, the kind."""
    out = []
    for key, value in config.items():
        kind = KINDS.get(key)
        if kind and not is_a(kind, value):
            out.append((where + key, value, kind))
        elif kind == "an object" and isinstance(value, dict):
            out += misplaced(value, f"{where}{key}.")
        elif kind == "a list" and value is not None and not all(type(x) in (int, str) for x in value):
            out.append((where + key, value, "a list of numbers or words"))
    return out


def cleaned(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without such keys."""
    bad = {name for name, _, _ in misplaced(config)}

    def clean(part: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {
            k: clean(v, f"{where}{k}.") if KINDS.get(k) == "an object" and isinstance(v, dict) else v
            for k, v in part.items()
            if where + k not in bad
        }

    return clean(config, "")


class Shape(NamedTuple):
    """A tensor as a card needs it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Folder:
    """A drafter's config and tensors, as they are, and what is known of its target."""

    config: dict[str, Any]
    tensors: Mapping[str, Shape]
    target: Target | None = None

    @property
    def flat(self) -> dict[str, Any]:
        """The layer's keys and the drafter's in one table, whatever the nesting."""
        inner = self.config.get("transformer_layer_config")
        return {**(inner if isinstance(inner, dict) else {}), **self.config}

    @property
    def nested(self) -> dict[str, Any]:
        found = self.config.get("eagle_config")
        return found if isinstance(found, dict) else {}

    def names(self) -> dict[str, str]:
        """Canonical name -> name on disk."""
        return {canonical(n): n for n in self.tensors}

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self.names().get(name)
        return self.tensors[found].shape if found else None


class Recognised(NamedTuple):
    dialect: str
    reason: str


def canonical(name: str) -> str:
    """A tensor's name in the vllm dialect: no prefix, midlayer for the first layer, fc_norm for its older names."""
    name = re.sub(r"^(model|draft_model|module|eagle_module)\.", "", name)
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return name


def named(name: str, dialect: str) -> str:
    """A canonical name in a dialect."""
    return (
        name.replace("midlayer.", "layers.0.", 1)
        if dialect in ("speculators", "modelopt") and name.startswith("midlayer.")
        else name
    )


def recognise(folder: Folder) -> Recognised:
    """Which dialect a folder is written in, by its plainest mark. Raises ContractError for what is no EAGLE-3 drafter."""
    config, nested = folder.config, folder.nested
    names = folder.names()
    kind = config.get("speculators_model_type")
    if kind is not None or "speculators_config" in config:
        if kind not in (None, "eagle3"):
            raise ContractError(f"speculators_model_type is {kind!r}: not an EAGLE-3 drafter")
        return Recognised("speculators", "speculators_model_type" if kind else "speculators_config")
    fc = folder.shape("fc.weight")
    if fc is None and names:
        raise ContractError(
            "there is no fc.weight among the tensors: not an EAGLE-3 drafter, or its names have a prefix that eyas does not know "
            f"(first names: {', '.join(sorted(folder.tensors)[:3])})"
        )
    if "next_layer_regular" in nested or "parallel_draft_step" in nested:
        return Recognised("modelopt", "eagle_config.next_layer_regular")
    if config.get(IDS) is not None:
        return Recognised("vllm", f"{IDS} at the top level")
    if nested.get(IDS) is not None:
        return Recognised("sglang", f"eagle_config.{IDS}")
    if config.get("architectures") == ["LlamaForCausalLM"] and "draft_vocab_size" in config:
        return Recognised("eagle", "LlamaForCausalLM with draft_vocab_size and no aux layers")
    if not names.keys() & {"t2d"} and "d2t" in names and "eagle_config" in config:
        return Recognised("modelopt", "d2t without t2d")
    return Recognised("vllm", "a flat config without marks of another")


def shift_of(ids: Collection[int], target: Target | None) -> int | None:
    """What SGLang adds to the ids of eagle_config to get ours; None where it depends on a target that is not known.

    Source: SGLang 0.5.23 models/llama.py (adds 1), deepseek_v2.py:3470 and glm4_moe_lite (add 1 only if the first id is 1).
    """
    first = next(iter(ids), None)
    if target is None:
        return 1 if first == 1 else None
    return 1 if target.model_type not in DEEPSEEK or first == 1 else 0


class Limit(NamedTuple):
    """What a dialect can say of a field, and why no more."""

    field: str
    says: Callable[[Any], bool]
    why: str


def _only(field: str, value: Any, why: str) -> Limit:
    return Limit(field, lambda found: found == value, why)


UNNORMED = _only("before_residual", False, "its layer adds the un-normed state")
FED_HIDDEN = _only("fed_back", "hidden", "it feeds the un-normed state back")
NO_FC_NORM = _only("fc_norm", "none", "it has no norm before fc")
FULL = _only("window", None, "its attention has no window")
PLAIN = (
    _only("qk_norm", False, "its layer has no norms of queries and keys"),
    _only("bias", False, "its projections have no biases"),
)
LIMITS: dict[str, tuple[Limit, ...]] = {
    "vllm": (),
    "sglang": (UNNORMED, FULL, *PLAIN),
    "speculators": (
        _only("architecture", "llama", "it knows no latent attention"),
        Limit("rope", lambda r: r.partial == 1, "its layer rotates whole heads"),
    ),
    "eagle": (
        _only("architecture", "llama", "it knows no latent attention"), UNNORMED, FED_HIDDEN, NO_FC_NORM, FULL, *PLAIN,
        Limit("rope", lambda r: r == Rope(10000.0), "its training code knows theta 10000 alone"),
        _only("depth", 1, "it has one layer"),
    ),
    "modelopt": (_only("architecture", "llama", "eyas does not know how it writes latent attention"), UNNORMED, FED_HIDDEN, NO_FC_NORM, FULL, _only("qk_norm", False, "its layer has no norms of queries and keys")),
}  # fmt: skip
NEEDED = (
    "architecture", "depth", "aux_layers", "fc_norm", "before_residual", "fed_back", "hidden", "target_hidden", "mlp", "heads",
    "kv_heads", "head_dim", "latent", "qk_norm", "bias", "activation", "eps", "rope", "window", "context", "vocab", "draft_vocab", "map", "dtype",
)  # fmt: skip


def cannot_say(card: Card, dialect: str) -> list[str]:
    """Why a drafter cannot be written in a dialect: what is unknown of it, and what the dialect has no words for."""
    out = [f"{FIELDS[name]} is unknown ({card[name].where})" for name in NEEDED if not card[name].known]
    out += [
        f"{FIELDS[limit.field]} is {card[limit.field].value}, and {limit.why}"
        for limit in LIMITS[dialect]
        if card[limit.field].known and not limit.says(card[limit.field].value)
    ]
    ids, n = card["aux_layers"].value, card["target_layers"].value
    if dialect == "eagle" and ids and ids != ((2, n // 2, n - 3) if n else None):
        out.append(
            f"aux layers are {list(ids)}, and its code has [2, n//2, n-3] fixed, of a target that must be known (--target)"
        )
    return out


def config_of(card: Card, dialect: str, about: Mapping[str, Any], model_type: str | None) -> dict[str, Any]:
    """config.json in a dialect. about: keys that say nothing of the drafter's meaning (eos_token_id, …); model_type: the target's, on
    which SGLang's numbering depends. Raises ContractError with all that cannot be said.
    """
    if why := cannot_say(card, dialect):
        raise ContractError(f"this drafter cannot be written for {dialect}: {'; '.join(why)}.")
    v = {name: fact.value for name, fact in card.items()}
    layer = _layer(v) | _rope(v["rope"])
    if dialect == "speculators":
        return _speculators(v, layer, about)
    out = {
        "architectures": [_architecture(v, dialect)],
        "model_type": _model_type(v),
        **layer,
        "draft_vocab_size": v["draft_vocab"],
    }
    out |= {"tie_word_embeddings": False, "torch_dtype": v["dtype"], "dtype": v["dtype"]}
    out |= {k: x for k, x in about.items() if k in TOKENS}
    if v["target_hidden"] != v["hidden"]:
        out["target_hidden_size"] = v["target_hidden"]  # null would break both engines
    ids = list(v["aux_layers"])
    if dialect in ("vllm", "sglang"):
        out |= {"num_aux_hidden_states": len(ids), "norm_output": v["fed_back"] == "normed"}
        out |= {"norm_before_fc": v["fc_norm"] == "whole", "fc_norm": v["fc_norm"] == "chunks"}
    nested = nested_ids(ids, model_type)
    if dialect == "vllm":
        out |= {IDS: ids, "norm_before_residual": v["before_residual"]}
        nested = (
            None if cannot_say(card, "sglang") else nested
        )  # one folder for both engines, where SGLang can run it
    elif dialect == "sglang" and nested is None:
        raise ContractError(
            "this drafter cannot be written for sglang: how it numbers layers depends on the target: give --target."
        )
    if dialect == "modelopt":
        nested = [i - 1 for i in ids]
    if nested is not None and dialect != "eagle":
        out["eagle_config"] = {IDS: nested, "use_aux_hidden_state": True}
    if dialect == "modelopt":
        out["eagle_config"] |= {
            "next_layer_regular": True,
            "use_last_layernorm": True,
            "use_input_layernorm_in_first_layer": True,
        }
    return out


def nested_ids(ids: list[int], model_type: str | None) -> list[int] | None:
    """Our ids as SGLang's class of the target reads them in eagle_config; None where the target is not known. The order does not count
    but for the first, which DeepSeek's class takes for a sign of the other numbering where it is 1."""
    if model_type is None:
        return None
    if model_type not in DEEPSEEK:
        return [i - 1 for i in ids]
    return ids if ids[0] != 1 else [*ids[1:], ids[0]]


def _architecture(v: Mapping[str, Any], dialect: str) -> str:
    if v["architecture"] == "mla":
        return "Eagle3DeepseekV2ForCausalLM"
    if v["qk_norm"]:
        return "Eagle3Qwen3ForCausalLM"
    return "LlamaForCausalLM" if dialect == "eagle" else "LlamaForCausalLMEagle3"


def _model_type(v: Mapping[str, Any]) -> str:
    if v["architecture"] == "mla":
        return "deepseek_v2"  # vLLM rewrites a deepseek_v3 drafter to its MTP class
    return "qwen3" if v["qk_norm"] else "llama"


def _layer(v: Mapping[str, Any]) -> dict[str, Any]:
    out = {
        "hidden_size": v["hidden"], "intermediate_size": v["mlp"], "num_attention_heads": v["heads"],
        "num_key_value_heads": v["kv_heads"], "head_dim": v["head_dim"], "num_hidden_layers": v["depth"], "vocab_size": v["vocab"],
        "max_position_embeddings": v["context"], "rms_norm_eps": v["eps"], "hidden_act": v["activation"], "attention_bias": v["bias"],
    }  # fmt: skip
    if v["latent"]:  # head_dim has another meaning in this family
        out = {k: x for k, x in out.items() if k != "head_dim"} | dict(
            zip(LATENT_KEYS, v["latent"], strict=True)
        )
    if v["window"]:
        out |= {
            "layer_types": ["sliding_attention"] * v["depth"],
            "sliding_window": v["window"],
            "use_sliding_window": True,
        }
    return out


def _rope(rope: Rope) -> dict[str, Any]:
    """Keys that every reader, old and new, understands alike: theta at the top level and inside the dict."""
    out: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.partial != 1:
        out["partial_rotary_factor"] = rope.partial
    if rope.scaling:
        out["rope_scaling"] = {**rope.scaling_dict(), "rope_theta": rope.theta}
    return out


def _speculators(v: Mapping[str, Any], layer: dict[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    rope = layer.pop("rope_scaling", {"rope_type": "default", "rope_theta": v["rope"].theta})
    layer.pop("rope_theta")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": v["draft_vocab"],
        "norm_before_residual": v["before_residual"], "norm_before_fc": v["fc_norm"] == "whole", "fc_norm": v["fc_norm"] == "chunks",
        "norm_output": v["fed_back"] == "normed", "eagle_aux_hidden_state_layer_ids": list(v["aux_layers"]),
        "target_hidden_size": v["target_hidden"] if v["target_hidden"] != v["hidden"] else None, "embed_requires_grad": False,
        "tie_word_embeddings": False, "dtype": v["dtype"],
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": about.get("verifier"), "architectures": about.get("verifier_architectures", [])},
        },
        "transformer_layer_config": {
            "model_type": "qwen3" if v["qk_norm"] else "llama", **layer, "rope_parameters": rope, "tie_word_embeddings": False,
            "num_aux_hidden_states": len(v["aux_layers"]), **{k: x for k, x in about.items() if k in TOKENS},
        },
    }  # fmt: skip
