"""The rules that a drafter's folder must pass, whoever trained it. Each reads Facts and yields findings; a healthy drafter yields none.

What an engine would make of it is in engine_rules.py. docs/checks.md has a section for each rule.
"""

from collections.abc import Callable, Iterator
from typing import Any

from eyas import contract as contracts
from eyas.causes import Finding, error, info, unknown, warning
from eyas.check import vocabulary
from eyas.contract import FIELDS
from eyas.drafter import dialects, shapes
from eyas.drafter.cards import ids_of
from eyas.drafter.dialects import IDS, NEVER_SAVED, shift_of
from eyas.drafter.facts import Facts
from eyas.errors import ContractError
from eyas.stores.weights import FLOATS

DECIDING = ("aux_layers", "before_residual", "fed_back", "fc_norm", "rope")  # unknown, they lose acceptance
COMPARED = (
    "architecture", "depth", "aux_layers", "fc_norm", "before_residual", "fed_back", "hidden", "mlp", "heads", "kv_heads", "head_dim", "latent",
    "qk_norm", "bias", "activation", "eps", "rope", "window", "context", "vocab", "draft_vocab", "dtype",
)  # fmt: skip
LATER = ("dtype", "eagle_config")  # keys that drafters of older versions of eyas do not have
WRITES = {
    "aux_layers": IDS, "fc_norm": "norm_before_fc and fc_norm", "before_residual": "norm_before_residual", "fed_back": "norm_output",
    "hidden": "hidden_size", "mlp": "intermediate_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "depth": "num_hidden_layers", "eps": "rms_norm_eps", "rope": "rope_theta and rope_scaling", "context": "max_position_embeddings",
    "vocab": "vocab_size", "draft_vocab": "draft_vocab_size", "activation": "hidden_act", "architecture": "architectures",
}  # fmt: skip


def files(f: Facts) -> Iterator[Finding]:
    for problem in f.weights.problems:
        yield error("files", problem, "fetch or write the file again")
    if f.weights.pickles:
        yield info(
            "files",
            f"{f.path}: {', '.join(f.weights.pickles[:3])} beside the safetensors are pickles, which eyas does not open and engines "
            "leave alone where there are safetensors",
        )


def tensors(f: Facts) -> Iterator[Finding]:
    """Names that belong to no drafter, and those that eyas's own contract asks for."""
    for disk in f.weights.tensors:
        if disk.startswith(NEVER_SAVED):
            yield warning(
                "tensors",
                f"{disk} is a tensor of the target, not of the drafter",
                "leave it out when saving",
            )
    if f.contract is None:
        return
    wanted = shapes.of_contract(f.contract)
    for name, shape in wanted.items():
        if name not in f.names and name == "t2d":
            continue  # engines ignore it, and ModelOpt writes none
        if name not in f.names:
            yield error(
                "tensors",
                f'tensor "{name}" is missing; the engine would leave it random',
                "train or export again",
            )
        elif (found := f.weights.tensors[f.names[name]].shape) != shape:
            yield error(
                "tensors",
                f'tensor "{name}" has shape {found}, expected {shape}',
                "train or export again",
            )
    for name, disk in f.names.items():
        if (
            name not in wanted
            and name not in ("embed_tokens.weight", "d2t", "t2d")
            and not disk.startswith(NEVER_SAVED)
        ):
            yield error("tensors", f'tensor "{disk}" is not part of this drafter', "remove it")


def finite(f: Facts) -> Iterator[Finding]:
    for name in f.weights.infinite():
        yield error(
            "finite",
            f"{f.path}: {name} holds NaN or infinity",
            "train again, from the last good checkpoint",
        )


def types(f: Facts) -> Iterator[Finding]:
    for key, value, kind in dialects.misplaced(f.config):
        yield error(
            "types",
            f"{f.path}/config.json: {key} is {value!r:.60}; every reader needs {kind}",
            "correct it",
        )
    kinds = {t.dtype for t in f.weights.tensors.values() if t.dtype in FLOATS}
    if len(kinds) > 1 and f.card["quantisation"].value is None:
        said = f"{f.path}: weights of several types ({', '.join(sorted(kinds))}); engines cast them to the target's"
        yield info("types", said)


def config(f: Facts) -> Iterator[Finding]:
    """config.json and the tensors against the contract of the training: key by key, and what they come to together."""
    if f.contract is None:
        return
    fix = f"eyas check {f.path} --fix"
    wrong = dict(changed_keys(f))
    for key, value in wrong.items():
        found = f.config.get(key, "nothing")
        yield error(
            "config",
            f"{f.path}/config.json: {key} is {found!r:.80}, the drafter was trained with {value!r:.80}",
            fix,
        )
    for name in COMPARED:
        found, trained = f.reading.card[name], f.card[name].value
        if (
            found.known
            and found.value != trained
            and not wrong.keys() & set(WRITES.get(name, name).split(" and "))
        ):
            said = f"{FIELDS[name]} {found.value} ({found.where})"
            yield error("config", f"{f.path} comes to {said}; it was trained with {trained}", fix)


def changed_keys(f: Facts) -> Iterator[tuple[str, Any]]:
    """Keys of config.json that are not what the contract comes to in this dialect, with what they should be."""
    assert f.contract is not None
    try:
        wanted = dialects.config_of(f.card, f.reading.dialect, {}, f.contract.target_model_type)
    except ContractError:
        return  # the dialect has no words for it: the card tells
    inner, found = wanted.get("transformer_layer_config"), f.config.get("transformer_layer_config")
    if inner and isinstance(found, dict):
        wanted["transformer_layer_config"] = {**found, **inner}
    for key, value in wanted.items():
        optional = key in LATER and key not in f.config
        if key != "speculators_config" and not optional and f.config.get(key, ...) != value:
            yield key, value


def tied(f: Facts) -> Iterator[Finding]:
    small, large = f.card["draft_vocab"].value, f.card["vocab"].value
    if f.folder.flat.get("tie_word_embeddings") is True and "lm_head.weight" in f.names:
        why = "" if small == large else f", and has {small} rows of the target's {large}"
        yield error("tied", f"{f.path}/config.json: tie_word_embeddings is true, and the drafter has a head of its own{why}: SGLang would take the embedding for it",
            "set tie_word_embeddings to false",
        )  # fmt: skip


def unknowns(f: Facts) -> Iterator[Finding]:
    for name in DECIDING:
        fact = f.card[name]
        if not fact.known:
            yield unknown("unknown", f"{FIELDS[name]}: {fact.where}", _ask(name))


def _ask(name: str) -> str:
    asks = {
        "aux_layers": f"ask who trained it, and state {IDS} (id i = input of layer i); with a target: --target DIR",
        "before_residual": "ask who trained it, and state norm_before_residual",
        "fed_back": "ask who trained it: state norm_output as engines mean it (true where norm(h) is fed back)",
        "rope": "state one theta and one scaling, in one place",
        "fc_norm": "leave only the norm that it was trained with",
    }
    return asks[name]


def layers(f: Facts) -> Iterator[Finding]:
    fact, n = f.card["aux_layers"], f.card["target_layers"].value
    if not fact.known:
        return
    ids = list(fact.value)
    if sorted(set(ids)) != ids or not ids or ids[0] < 0 or (n is not None and ids[-1] > n):
        most = n if n is not None else "n"
        yield error(
            "layers",
            f"{f.path}: aux layers {ids} ({fact.where}) are not ascending ids in 0..{most}",
            "state the layers that it was trained on",
        )
    elif f.contract is None and n and ids == [1, n // 2 - 1, n - 4] and fact.source == "stated":
        ours = [i + 1 for i in ids]
        yield error("layers", f"{f.path}: {fact.where} is {ids}, the default of SpecForge and ModelOpt, which number the outputs of layers: the same states are "
            f"{ours} in this key, and vLLM would read every layer one too early",
            f"write {ours} for {IDS}, or move {ids} into eagle_config for SGLang alone",
        )  # fmt: skip
    own, nested = ids_of(f.folder.flat.get(IDS)), ids_of(f.folder.nested.get(IDS))
    shift = shift_of(nested, f.target) if nested else None
    if own and nested and shift is not None and sorted(own) != sorted(i + shift for i in nested):
        yield error("layers", f"{f.path}/config.json says two things: {IDS} {list(own)} for vLLM, and eagle_config's {list(nested)}, which SGLang takes for "
            f"{sorted(i + shift for i in nested)}",
            "make both say the layers that it was trained on",
        )  # fmt: skip


def widths(f: Facts) -> Iterator[Finding]:
    """fc takes the aux states together, and gives the drafter's width."""
    shape = f.folder.shape("fc.weight")
    hidden, wide, ids = (f.card[n].value for n in ("hidden", "target_hidden", "aux_layers"))
    if shape is None or len(shape) != 2:
        yield error("widths", f"{f.path}: fc.weight has shape {shape}", "export again")
        return
    if hidden and shape[0] != hidden:
        yield error(
            "widths",
            f"{f.path}: fc gives {shape[0]}, and hidden_size is {hidden}",
            "correct config.json",
        )
    if wide and ids and shape[1] != len(ids) * wide:
        yield error("widths", f"{f.path}: fc takes {shape[1]}, and {len(ids)} aux layers of {wide} are {len(ids) * wide}",
            "state as many layers as it was trained on, or target_hidden_size",
        )  # fmt: skip
    if f.target and wide and wide != f.target.hidden:
        yield error(
            "widths",
            f"{f.path}: the aux states are {wide} wide, and {f.target.folder} has {f.target.hidden}",
            "give the target that it was trained for",
        )
    if hidden and wide and hidden != wide and f.card["embedding"].value != "own":
        yield error(
            "widths",
            f"{f.path}: the drafter is {hidden} wide, its target {wide}, and there is no embed_tokens of its own",
            "export embed_tokens",
        )


def flags(f: Facts) -> Iterator[Finding]:
    """Norm flags and norm tensors say the same."""
    flat = f.folder.flat
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        value = f.folder.nested.get(flag, flat.get(flag))
        if bool(value) and name not in f.names:
            yield error(
                "flags",
                f"{f.path}/config.json: {flag} is true, and there is no {name}: the norm would be one of ones",
                f"set {flag} to false, or export the norm",
            )
        if not value and name in f.names:
            yield error(
                "flags",
                f"{f.path}: there is {name}, and {flag} is {'not stated' if value is None else 'false'}: engines leave the norm out or refuse it",
                f"set {flag} to true",
            )
    if flat.get("norm_before_residual") is not None and not isinstance(flat["norm_before_residual"], bool):
        yield error(
            "flags",
            f"{f.path}/config.json: norm_before_residual is {flat['norm_before_residual']!r:.60}",
            "write true or false",
        )


def architecture(f: Facts) -> Iterator[Finding]:
    names = f.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if f.reading.dialect not in ("speculators", "eagle") and isinstance(name, str) and "Eagle3" not in name:
        yield error("architecture", f"{f.path}/config.json: architectures names {name}, a plain language model, and the tensors are an EAGLE-3 drafter's: transformers "
            "would fill what does not fit at random",
            "write LlamaForCausalLMEagle3 (Eagle3DeepseekV2ForCausalLM with latent attention)",
        )  # fmt: skip


def same_target(f: Facts) -> Iterator[Finding]:
    if f.target is None:
        yield info("target", "no target given (--target DIR): the drafter is checked alone")
        return
    t, c = f.target, f.contract
    if c is None:
        vocab, rope = f.card["vocab"], f.card["rope"]
        if vocab.known and vocab.value != t.vocab:
            yield error(
                "target",
                f"{f.path}: vocabulary of {vocab.value:,} ids, and {t.folder} has {t.vocab:,}",
                "give the target that it was trained for",
            )
        if rope.known and not t.latent and rope.value.theta != t.rope_theta:
            yield warning("target", f"{f.path}: rope theta is {rope.value.theta:g} ({rope.where}), and the target's {t.rope_theta:g}: right if it was trained so, and lost "
                "acceptance that grows with the context if a conversion dropped it",
                "compare with the training's config",
            )  # fmt: skip
        return
    for name, ours, theirs in contracts.misfits(c, t):
        yield error("target", f"{name}: the drafter expects {ours}, {t.folder} has {theirs}")
    if c.target_fingerprint != t.fingerprint:
        yield warning(
            "target",
            f"the drafter was trained for {c.target_identity} ({c.target_fingerprint}); {t.folder} is {t.identity} "
            f"({t.fingerprint}): other weights, tokenizer or template lower acceptance",
        )


def trainers(f: Facts) -> Iterator[Finding]:
    """What a trainer is known to do, which config and tensors cannot show."""
    if f.reading.dialect == "modelopt" and any(n.startswith("layers.0.") for n in f.weights.tensors):
        yield info("trainers", "ModelOpt 0.47 trains q, k and v on hidden_norm(input_layernorm(h)), and engines compute hidden_norm(h): acceptance in serving may lie "
            "below that of training, with nothing wrong in the files",
        )  # fmt: skip
    rope = f.card["rope"].value
    if f.reading.dialect == "modelopt" and rope and dict(rope.scaling).get("kind") == "yarn":
        yield info(
            "trainers",
            f"rope: {rope}; ModelOpt trains plain rope and writes yarn when it exports, for longer contexts",
        )


def length(f: Facts) -> Iterator[Finding]:
    trained, context = f.card["trained_length"], f.card["context"]
    if trained.known and f.target and trained.value < f.target.context:
        yield info(
            "length",
            f"trained on rows of at most {trained.value:,} tokens; beyond them acceptance is not known ({f.target.context:,} are served)",
        )
    if context.known and f.target and context.value < f.target.context:
        yield warning("length", f"{f.path}/config.json: max_position_embeddings is {context.value:,}, below the target's {f.target.context:,}: SGLang does not start, and vLLM "
            "stops drafting beyond it",
            f"write {f.target.context}, or serve with a shorter context",
        )  # fmt: skip


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    files, tensors, finite, types, config, tied, unknowns, vocabulary.rule, layers, widths, flags, architecture, same_target, trainers, length,
)  # fmt: skip
