"""What vLLM makes of a drafter's folder (method eagle3), by version and runner. Read in the wheels of 0.18.1, 0.22.1, 0.25.1 and 0.32.0.

Sources, in each: transformers_utils/configs/eagle.py and configs/speculators/algos.py (the config), v1/worker/gpu_model_runner.py and
v1/worker/gpu/spec_decode/eagle/eagle3_utils.py (layers by runner V1 and V2), model_executor/models/llama_eagle3.py, qwen3_eagle3.py,
deepseek_eagle3.py (flags and tensors), models/interfaces.py and deepseek_v2.py (capture).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from eyas.contract import FIELDS, Contract, Rope, card
from eyas.drafter import dialects
from eyas.drafter.cards import ids_of, latent_of, rope_of, whole
from eyas.drafter.dialects import IDS, Folder, Shape, cleaned
from eyas.drafter.shapes import of_contract, parameters
from eyas.engines.loading import Version, View, at, misshapen, parse, shown, sort_tensors
from eyas.errors import UsageError

READ: tuple[Version, ...] = ((0, 18, 1), (0, 22, 1), (0, 25, 1), (0, 32, 0))
RUNNERS = ("V1", "V2")
LLAMA = {
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
}
MLA = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
QWEN3, QWEN3_SINCE = "Eagle3Qwen3ForCausalLM", (0, 25)
TO_MTP = {
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
}  # such a drafter becomes DeepSeekMTPModel, and is refused
LATENT_TARGETS = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"}
TARGETS_018 = (
    "llama",
    "qwen",
    "minicpm",
    "gpt_oss",
    "hunyuan",
    "afmoe",
    "nemotron_h",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
)
# The config class fills what is absent.
DEFAULTS = {
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}


def views(version: Version, folder: Folder) -> list[View]:
    """The runners' views; one where they see the same."""
    folder = replace(folder, config=cleaned(folder.config))  # a value of another kind is a finding of its own
    made = [
        at(f"vLLM {shown(version)} ({r})", version, READ, partial(_view, runner=r, folder=folder))
        for r in RUNNERS
    ]
    if (made[0].fields, made[0].refuses) == (made[1].fields, made[1].refuses):
        made[0].engine = f"vLLM {shown(version)}"
        return made[:1]
    return made


def refuse(version: str, c: Contract) -> None:
    """Raises UsageError where this version would run a drafter of eyas's otherwise than it was trained, in silence or not at all.

    What is unknown of a version is not refused: eyas serve says that it is untested.
    """
    tensors = {name: Shape("BF16", shape) for name, shape in of_contract(c).items()}
    folder = Folder(dialects.config_of(card(c), "vllm", {}, c.target_model_type), tensors)
    seen, trained = views(parse(version), folder), card(c)
    why = {
        f"{FIELDS[n]} {view.fields[n].value}, trained with {trained[n].value}"
        for view in seen
        for n in ("aux_layers", "fc_norm", "before_residual", "fed_back", "qk_norm", "rope", "map")
        if view.fields[n].known and view.fields[n].value != trained[n].value
    }
    why |= {reason for view in seen for reason in view.refuses}
    if why:
        raise UsageError(
            f"vLLM {version} would not run this drafter as it was trained: {'; '.join(sorted(why))}. Use {shown(READ[-1])}, or train one "
            "with train.norms.fc none or whole, train.norms.output false and three aux layers."
        )


def default_runner(version: Version, target_type: str | None, device: str) -> str | None:
    """The runner that a version takes, or None where it depends on more. Source: config/vllm.py, envs.py."""
    if device == "cpu" or version < (0, 22):
        return "V1"
    if version >= (0, 32):
        return "V2"
    latent = target_type in LATENT_TARGETS
    return (
        "V1"
        if latent or (version < (0, 25) and target_type != "qwen3")
        else "V2"
        if target_type in ("llama", "qwen2")
        else None
    )


def _view(v: Version, runner: str, folder: Folder) -> View:
    made = View(f"vLLM {shown(v)} ({runner})")
    config, arch = _speculators(v, folder, made) if _is_speculators(folder) else _flat(v, folder, made)
    kind = "mla" if arch in MLA else "qwen3" if arch == QWEN3 else "llama"
    nested = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    assert isinstance(nested, dict)
    _sizes(made, config, kind, folder)
    _layers(made, v, runner, config, nested, folder)
    width = _norms(made, v, config, nested, kind)
    _rope(made, v, config, kind)
    _tensors(made, v, config, kind, folder, width)
    return made


def _is_speculators(folder: Folder) -> bool:
    kind = folder.config.get("model_type")
    return kind in (None, "speculators") and folder.config.get("speculators_config") is not None


def _flat(v: Version, folder: Folder, made: View) -> tuple[dict[str, Any], str]:
    config = {
        **DEFAULTS,
        **{k: x for k, x in folder.config.items() if x is not None or k == "target_hidden_size"},
    }
    names = folder.config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if folder.config.get("model_type") is None:
        made.refuses.append("config.json has no model_type, without which transformers does not read it")
    if name is None:
        made.refuses.append("config.json names no architecture")
        return config, ""
    arch = name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"
    if folder.config.get("model_type") in TO_MTP:
        made.refuses.append(
            f"a drafter of model_type {folder.config['model_type']} is taken for an MTP layer and refused; deepseek_v2 is read"
        )
    if arch not in LLAMA | MLA and not (arch == QWEN3 and v >= QWEN3_SINCE):
        made.refuses.append(
            f"architecture {name} (as {arch}) is not one that it serves as an EAGLE-3 drafter"
        )
    if "target_hidden_size" in folder.config and folder.config["target_hidden_size"] is None:
        made.refuses.append("target_hidden_size is null, which fails in fc: leave the key out")
    return config, arch


def _speculators(v: Version, folder: Folder, made: View) -> tuple[dict[str, Any], str]:
    """The flat config that algos.py makes."""
    top = folder.config
    inner = top.get("transformer_layer_config")
    out = dict(inner) if isinstance(inner, dict) else {}
    out |= {
        "draft_vocab_size": top.get("draft_vocab_size"),
        "norm_before_residual": top.get("norm_before_residual", True),
    }
    if top.get("target_hidden_size") is not None:
        out["target_hidden_size"] = top["target_hidden_size"]
    if v >= (0, 22):
        out["norm_before_fc"] = top.get("norm_before_fc", False)
    if v >= (0, 25):
        out |= {name: top.get(name, False) for name in ("fc_norm", "norm_output")}
    if top.get(IDS):
        out[IDS] = top[IDS]
    if top.get("speculators_model_type") != "eagle3":
        made.refuses.append(
            f"speculators_model_type is {top.get('speculators_model_type')!r:.40}, not eagle3"
        )
    kind = out.get("model_type", "llama")
    if v < (0, 25) or kind == "llama":
        return out, "Eagle3LlamaForCausalLM"
    if kind != "qwen3":
        made.refuses.append(f"transformer_layer_config.model_type {kind!r:.40} is neither llama nor qwen3")
    return out, QWEN3


def _sizes(made: View, config: dict[str, Any], kind: str, folder: Folder) -> None:
    def number(field: str, key: str, default: Any, why: str) -> None:
        value = config.get(key)
        made.take(field, value if whole(value) else default, key if whole(value) else why)

    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    made.take("architecture", "mla" if kind == "mla" else "llama", "architectures")
    number("depth", "num_hidden_layers", 32, "num_hidden_layers is not stated: 32")
    number("hidden", "hidden_size", None, "hidden_size is not stated")
    number("target_hidden", "target_hidden_size", hidden, "no target_hidden_size: the drafter's own")
    number("mlp", "intermediate_size", None, "intermediate_size is not stated")
    number("heads", "num_attention_heads", None, "num_attention_heads is not stated")
    number(
        "kv_heads",
        "num_key_value_heads",
        32 if kind == "qwen3" else heads,
        "num_key_value_heads is not stated",
    )
    split = hidden // heads if whole(hidden) and whole(heads) else None
    key = "v_head_dim" if kind == "mla" else "head_dim"
    number(
        "head_dim",
        key,
        128 if kind in ("qwen3", "mla") else split,
        f"{key} is not stated: {'128' if kind != 'llama' else 'width by heads'}",
    )
    made.fields["latent"] = (
        latent_of(config)
        if kind == "mla"
        else made.fields["head_dim"]._replace(value=None, where="class of the drafter")
    )
    number("vocab", "vocab_size", None, "vocab_size is not stated")
    number(
        "draft_vocab",
        "draft_vocab_size",
        config.get("vocab_size"),
        "no draft_vocab_size: the whole vocabulary",
    )
    made.take("qk_norm", kind == "qwen3", "class of the drafter")
    made.take("bias", config.get("attention_bias") is True, "attention_bias")
    made.take("activation", config.get("hidden_act", "silu"), "hidden_act")
    if config.get("hidden_act", "silu") != "silu":
        made.refuses.append(f"hidden_act is {config['hidden_act']!r:.40}; only silu is supported")
    made.take("eps", config.get("rms_norm_eps"), "rms_norm_eps")
    slides = isinstance(config.get("layer_types"), list) and "sliding_attention" in config["layer_types"]
    made.take(
        "window",
        config.get("sliding_window") if slides and kind != "mla" else None,
        "layer_types and sliding_window",
    )
    about = config.get("quantization_config")
    made.take(
        "quantisation",
        str(about.get("quant_method")) if isinstance(about, dict) else None,
        "quantization_config",
    )


def _layers(
    made: View, v: Version, runner: str, config: dict[str, Any], nested: dict[str, Any], folder: Folder
) -> None:
    found, where = config.get(IDS), IDS
    if not found and runner == "V1" and v >= (0, 22):
        found, where = nested.get(IDS), f"eagle_config.{IDS}, as it stands"
    if not found and runner == "V2" and v >= (0, 32):
        found, where = nested.get("layer_ids"), "eagle_config.layer_ids"
    ids = ids_of(found)
    n = folder.target.layers if folder.target else None
    if ids is None:
        why = "no aux layers where this version looks for them: its default [2, n//2, n-3]"
        if n is None:
            made.fields["aux_layers"] = made.fields["target_hidden"]._replace(
                value=None, source="unknown", where=f"{why}, of a target that is not given"
            )
        else:
            made.take("aux_layers", (2, n // 2, n - 3), why)
        return
    made.take("aux_layers", tuple(sorted(set(ids))), where)
    latent = folder.target is not None and folder.target.model_type in LATENT_TARGETS
    if n is not None and max(ids) > n:
        made.refuses.append(f"aux layer {max(ids)} is beyond the target's {n} layers")
    if latent and n in ids and v < (0, 25):
        made.refuses.append(
            f"aux layer {n} (the last output) is not captured in targets of this family before 0.25"
        )
    if latent and 0 in ids:
        made.refuses.append("aux layer 0 fails at the first request in targets of this family")
    if len(set(ids)) != len(ids):
        made.refuses.append(f"aux layers {list(ids)} repeat one, which is captured once: fc is too wide")
    if v < (0, 22) and folder.target and not any(t in folder.target.model_type for t in TARGETS_018):
        made.refuses.append(
            f"targets of model_type {folder.target.model_type} are not on its list for eagle3"
        )


def _norms(made: View, v: Version, config: dict[str, Any], nested: dict[str, Any], kind: str) -> int:
    """The norms, and the columns of fc."""
    flag = (
        nested.get("norm_before_fc", config.get("norm_before_fc", False))
        if v >= (0, 22)
        else config.get("norm_before_fc", False)
    )
    whole_norm = bool(flag) and kind != "mla"
    chunks = bool(config.get("fc_norm")) and v >= ((0, 25) if kind == "mla" else (0, 22))
    made.take(
        "fc_norm",
        "both" if whole_norm and chunks else "whole" if whole_norm else "chunks" if chunks else "none",
        "norm_before_fc and fc_norm",
    )
    made.take("before_residual", bool(config.get("norm_before_residual", False)), "norm_before_residual")
    fed = bool(config.get("norm_output")) and v >= (0, 22)
    made.take(
        "fed_back",
        "normed" if fed else "hidden",
        "norm_output" if v >= (0, 22) else "it knows no norm_output",
    )
    return _count(v, config, nested, kind) * (made.fields["target_hidden"].value or 0)


def _count(v: Version, config: dict[str, Any], nested: dict[str, Any], kind: str) -> int:
    """Aux states that fc takes together."""
    stated = config.get("num_aux_hidden_states")
    if v < (0, 22):
        return 3
    if whole(stated):
        return stated
    listed = ids_of(nested.get(IDS))
    if kind == "qwen3":
        listed = ids_of(config.get(IDS)) or listed
    return len(listed) if listed else 3


def _rope(made: View, v: Version, config: dict[str, Any], kind: str) -> None:
    found, said = rope_of(config)
    parameters_ = config.get("rope_parameters")
    inside = isinstance(parameters_, dict) and parameters_.get("rope_theta") is not None
    if v < (0, 25):  # transformers 4: the theta at the top level, and 10000 where there is none
        theta = config.get("rope_theta")
        theta = float(theta) if isinstance(theta, int | float) and not isinstance(theta, bool) else 10000.0
        said = (
            "rope_theta"
            if config.get("rope_theta") is not None
            else "no rope_theta at the top level: 10000 with transformers 4"
        )
        if kind == "mla" and not config.get("rope_scaling"):
            theta, said = 10000.0, "latent attention without rope_scaling: 10000"
        if found:
            made.take("rope", found._replace(theta=theta), said)
            return
        if not inside:
            made.take("rope", Rope(theta), said)
            return
    if found is None:
        made.fields["rope"] = made.fields["eps"]._replace(value=None, source="unknown", where=said)
        return
    if kind == "mla" and (0, 25) <= v < (0, 32) and not found.scaling:
        made.refuses.append("latent attention without rope_scaling fails with KeyError 'factor'")
    made.take("rope", found, said)


def _tensors(made: View, v: Version, config: dict[str, Any], kind: str, folder: Folder, width: int) -> None:
    f = {name: fact.value for name, fact in made.fields.items()}
    flags = {
        "input_norm": f["fc_norm"] in ("whole", "both"),
        "fc_norm": f["fc_norm"] in ("chunks", "both"),
        "qk_norm": f["qk_norm"],
        "bias": f["bias"],
    }
    chunks = width // f["target_hidden"] if f["target_hidden"] else 3
    wanted = parameters(kind, f["depth"], flags, chunks)
    if kind == "mla" and v < (0, 25) and config.get("fc_norm"):
        made.notes.append("fc_norm is not applied to a drafter with latent attention before 0.25")
    reduced = bool(f["draft_vocab"] and f["vocab"] and f["draft_vocab"] < f["vocab"])
    names = folder.names()
    made.take(
        "map",
        "all" if not reduced else "offsets" if "d2t" in names else "first ids",
        "d2t" if "d2t" in names else "no d2t: a draft id is taken for a target id",
    )
    made.take("head", "own" if "lm_head.weight" in names else "target", "tensors")
    made.take("embedding", "own" if "embed_tokens.weight" in names else "target", "tensors")
    known = {*wanted, "lm_head.weight", "embed_tokens.weight", "d2t"}
    if v >= (0, 32) and not reduced and "d2t" in names:
        known.discard("d2t")

    def accepts(disk: str, name: str) -> str:
        if "t2d" in disk or (
            name == "input_norm.weight" and not flags["input_norm"] and (kind != "mla" or v < (0, 25))
        ):
            return "skip"
        if disk.startswith("model.") or name not in known:
            if name.endswith(".bias") and v >= (0, 25):
                return "skip"
            return "skip" if kind == "mla" and v < (0, 25) else "refuse"
        return "load"

    sort_tensors(made, folder, wanted, accepts)
    if "lm_head.weight" not in names and reduced:
        made.left.append("lm_head.weight")
    made.refuses += misshapen(folder, made.fields, width)
