"""What SGLang makes of a drafter's folder (EAGLE3, topk 1), by version. Read in the wheels of 0.5.14 and 0.5.23.

Sources, in each: srt/models/llama_eagle3.py and kimi_k25_eagle3.py (flags, tensors), model_runner.py and spec_aux_hidden_state.py (layers),
models/llama.py, deepseek_v2.py, gpt_oss.py (numbering and capture), configs/model_config.py (type, length).
"""

from dataclasses import replace
from typing import Any

from eyas.drafter.cards import ids_of, latent_of, rope_of, whole
from eyas.drafter.dialects import DEEPSEEK, IDS, Folder, cleaned
from eyas.drafter.shapes import MOST_LAYERS, parameters
from eyas.engines.loading import Version, View, at, misshapen, shown, sort_tensors

READ: tuple[Version, ...] = ((0, 5, 14), (0, 5, 23))
LLAMA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
CAPTURE_LAST = {
    "gemma3": (0, 5, 14),
    "gemma3_text": (0, 5, 14),
    "gemma4": (0, 5, 14),
    "gpt_oss": (0, 5, 23),
}  # since
YARN_SCALES = {"mscale", "mscale_all_dim"}


def views(version: Version, folder: Folder) -> list[View]:
    """The one view: SGLang has one runner."""
    folder = replace(folder, config=cleaned(folder.config))  # a value of another kind is a finding of its own
    return [at(f"SGLang {shown(version)}", version, READ, lambda v: _view(v, folder))]


def _view(v: Version, folder: Folder) -> View:
    made = View(f"SGLang {shown(v)}")
    config = {"num_hidden_layers": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048} | {
        k: x
        for k, x in folder.config.items()
        if x is not None or k in ("target_hidden_size", "draft_vocab_size")
    }
    kind = _starts(v, folder, made)
    _sizes(made, config, kind)
    ids = _layers(made, v, folder, config)
    width = _norms(made, v, folder, config, kind, ids)
    _rope(made, v, config)
    _tensors(made, folder, config, kind, width)
    return made


def _starts(v: Version, folder: Folder, made: View) -> str:
    config = folder.config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if config.get("speculators_config") is not None or config.get("speculators_model_type") is not None:
        made.refuses.append("it does not read the speculators format")
    elif config.get("model_type") is None:
        made.refuses.append("config.json has no model_type, without which transformers does not read it")
    if name not in (LLAMA, MLA):
        made.refuses.append(
            f"architecture {name} is not one that it serves as an EAGLE-3 drafter ({LLAMA}, {MLA})"
        )
    if "draft_vocab_size" not in config and name == LLAMA:
        made.refuses.append("config.json has no draft_vocab_size, which it needs")
    if "eagle_config" in config and config["eagle_config"] is None and v < (0, 5, 23):
        made.refuses.append("eagle_config is null: leave the key out")
    if "target_hidden_size" in config and config["target_hidden_size"] is None and name == LLAMA:
        made.refuses.append("target_hidden_size is null, which fails in fc: leave the key out")
    if config.get("hidden_act", "silu") != "silu":
        made.refuses.append(f"hidden_act is {config['hidden_act']!r:.40}; only silu is supported")
    if folder.nested.get("use_aux_hidden_state") is False:
        made.refuses.append("eagle_config.use_aux_hidden_state is false: the aux states would not be used")
    if folder.target is not None:
        length = config.get("max_position_embeddings")
        length = length if whole(length) else 2048
        if length < folder.target.context:
            made.refuses.append(
                f"max_position_embeddings is {length}, below the target's {folder.target.context}: it does not start unless "
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set or the server's --context-length is no more"
            )
    return "mla" if name == MLA else "llama"


def _sizes(made: View, config: dict[str, Any], kind: str) -> None:
    def number(field: str, key: str, default: Any, why: str) -> None:
        value = config.get(key)
        made.take(field, value if whole(value) else default, key if whole(value) else why)

    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    made.take("architecture", kind, "architectures")
    number("depth", "num_hidden_layers", 32, "num_hidden_layers is not stated: 32")
    number("hidden", "hidden_size", 4096, "hidden_size is not stated: 4096")
    number("target_hidden", "target_hidden_size", hidden, "no target_hidden_size: the drafter's own")
    number("mlp", "intermediate_size", 11008, "intermediate_size is not stated: 11008")
    number("heads", "num_attention_heads", 32, "num_attention_heads is not stated: 32")
    number("kv_heads", "num_key_value_heads", heads, "num_key_value_heads is not stated")
    split = hidden // heads if whole(hidden) and whole(heads) else None
    number(
        "head_dim",
        "v_head_dim" if kind == "mla" else "head_dim",
        split,
        "head_dim is not stated: width by heads",
    )
    made.fields["latent"] = (
        latent_of(config)
        if kind == "mla"
        else made.fields["head_dim"]._replace(value=None, where="class of the drafter")
    )
    number("vocab", "vocab_size", 32000, "vocab_size is not stated: 32000")
    number(
        "draft_vocab",
        "draft_vocab_size",
        config.get("vocab_size"),
        "draft_vocab_size is null: the target's head",
    )
    made.take("qk_norm", False, "its layer has none")
    made.take("bias", False, "its q, k, v have none")
    made.take("activation", config.get("hidden_act", "silu"), "hidden_act")
    made.take("eps", config.get("rms_norm_eps"), "rms_norm_eps")
    made.take("window", None, "it ignores layer_types and sliding_window")
    about = config.get("quantization_config")
    made.take(
        "quantisation",
        str(about.get("quant_method")) if isinstance(about, dict) else None,
        "quantization_config",
    )
    made.take("before_residual", False, "it always adds the un-normed state")


def _layers(made: View, v: Version, folder: Folder, config: dict[str, Any]) -> tuple[int, ...] | None:
    listed = ids_of(folder.nested.get(IDS))
    target = folder.target
    if listed is None:
        why = f"no eagle_config.{IDS}: the target's default [2, n//2, n-3]"
        if target is None:
            made.fields["aux_layers"] = made.fields["eps"]._replace(
                value=None, source="unknown", where=f"{why}, of a target that is not given"
            )
        else:
            n = target.layers
            made.take("aux_layers", (2, n // 2, n - 3), why)
        return None
    if target is None:
        a, b = tuple(sorted({i + 1 for i in listed})), tuple(sorted(set(listed)))
        if listed[0] == 1:
            made.take("aux_layers", a, f"eagle_config.{IDS} + 1")
        else:
            why = f"eagle_config.{IDS} {list(listed)} is {list(a)} for most targets and {list(b)} for DeepSeek's and Kimi's: give --target"
            made.fields["aux_layers"] = made.fields["eps"]._replace(value=None, source="unknown", where=why)
        return listed
    shift = 1
    if target.model_type in DEEPSEEK:
        shift = 1 if listed[0] == 1 else 0
    elif target.model_type == "gpt_oss" and v >= (0, 5, 23):
        shift = 0 if max(listed) == target.layers else 1
    ids = tuple(sorted({i + shift for i in listed}))
    made.take(
        "aux_layers", ids, f"eagle_config.{IDS}{' + 1' if shift else ' as they are (class of the target)'}"
    )
    since = CAPTURE_LAST.get(target.model_type)
    if ids[-1] > target.layers or (ids[-1] == target.layers and (since is None or v < since)):
        made.refuses.append(
            f"aux layer {ids[-1]} is not captured in targets of model_type {target.model_type} ({target.layers} layers)"
        )
    if len(ids) != len(listed):
        made.refuses.append(f"aux layers {list(listed)} repeat one, which is captured once: fc is too wide")
    return listed


def _norms(
    made: View, v: Version, folder: Folder, config: dict[str, Any], kind: str, ids: tuple[int, ...] | None
) -> int:
    """The norms, and the columns of fc."""
    flag = (
        folder.nested.get("norm_before_fc", config.get("norm_before_fc", False))
        and v >= (0, 5, 23)
        and kind == "llama"
    )
    chunks = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    made.take(
        "fc_norm",
        "both" if flag and chunks else "whole" if flag else "chunks" if chunks else "none",
        "norm_before_fc and fc_norm",
    )
    made.take("fed_back", "normed" if config.get("norm_output") else "hidden", "norm_output")
    stated = config.get("num_aux_hidden_states")
    own = ids_of(config.get(IDS)) if kind == "mla" else None
    listed = len(ids) if ids else len(own) if own else 3
    count = stated if whole(stated) and kind == "llama" else listed
    if count == 1:
        made.refuses.append("with one aux layer fc and its norms are left out, in silence")
    if count != 3 and v < (0, 5, 23):
        made.notes.append(
            f"{count} aux layers: only the FA3 attention backend runs other than three in this version"
        )
    return count * (made.fields["target_hidden"].value or 0)


def _rope(made: View, v: Version, config: dict[str, Any]) -> None:
    found, said = rope_of(config)
    if found is None:
        made.fields["rope"] = made.fields["eps"]._replace(value=None, source="unknown", where=said)
        return
    if found.partial != 1 and config.get("partial_rotary_factor") is None:
        found, said = found._replace(partial=1.0), "partial_rotary_factor is read at the top level alone"
    if (
        v < (0, 5, 23)
        and dict(found.scaling).get("kind") == "yarn"
        and made.fields["architecture"].value == "llama"
    ):
        kept = tuple(x for x in found.scaling if x[0] not in YARN_SCALES)
        said = "mscale keys of yarn are not read" if kept != found.scaling else said
        found = found._replace(scaling=kept)
    made.take("rope", found, said)


def _tensors(made: View, folder: Folder, config: dict[str, Any], kind: str, width: int) -> None:
    f = {name: fact.value for name, fact in made.fields.items()}
    flags = {"input_norm": f["fc_norm"] in ("whole", "both"), "fc_norm": f["fc_norm"] in ("chunks", "both")}
    depth = min(f["depth"], MOST_LAYERS)
    wanted = parameters(kind, depth, flags, width // f["target_hidden"] if f["target_hidden"] else 3)
    names = folder.names()
    reduced = bool(f["draft_vocab"] and f["vocab"] and f["draft_vocab"] < f["vocab"])
    made.take(
        "map",
        "all" if not reduced else "offsets" if "d2t" in names else "first ids",
        "d2t" if "d2t" in names else "no d2t: a draft id is taken for a target id",
    )
    tied, theirs = bool(config.get("tie_word_embeddings")), config.get("draft_vocab_size") is None
    made.take(
        "head",
        "target" if tied or theirs else "own",
        "tie_word_embeddings" if tied else "draft_vocab_size" if theirs else "lm_head",
    )
    own = f["target_hidden"] != f["hidden"]
    made.take(
        "embedding", "own" if own else "target", "the target's takes its place where the widths are equal"
    )
    known = {*wanted, "lm_head.weight", "embed_tokens.weight", "d2t"}

    def accepts(disk: str, name: str) -> str:
        prefixed = kind == "mla" and disk.startswith("model.")
        return "load" if name in known and not prefixed and "t2d" not in disk else "skip"

    sort_tensors(made, folder, wanted, accepts)
    if "lm_head.weight" not in names and not theirs:
        made.left.append("lm_head.weight")
    made.refuses += misshapen(folder, made.fields, width)
