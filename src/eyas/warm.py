"""The drafter that training starts from (`train.init_from`): anybody's folder or file, or one that ships; what is kept of it.

What it states is kept: aux layers, norms, shape, rope, vocabulary. A key that the recipe states by itself goes before that, and is said;
what neither states is refused by name. Nothing here loads weights.
"""

from typing import Any

from eyas import contract as contracts
from eyas import recipe
from eyas.contract import FIELDS, Contract, Norms
from eyas.drafter import facts
from eyas.drafter.facts import Facts
from eyas.errors import ContractError, RecipeError
from eyas.recipe import Recipe, Resolved, Value
from eyas.rundir import file_hash, fingerprint
from eyas.target import Target

KEYS = {
    "target.aux_layers": "aux_layers", "train.draft_vocab": "draft_vocab", "train.norms.before_residual": "before_residual",
    "train.norms.fc": "fc_norm", "train.norms.output": "fed_back", "train.norms.qk": "qk_norm", "train.architecture": "architecture",
}  # fmt: skip


def facts_of(word: str, target: Target | None) -> Facts:
    """Raises RecipeError where there is no drafter, or it cannot be read."""
    try:
        return facts.gather(recipe.find_drafter(word), target)
    except ContractError as e:
        raise RecipeError(f'"train.init_from": {word}: {e}') from e


def settle(read: Recipe, values: dict[str, Value], target: Target | None) -> Recipe:
    """The recipe with what a warm start keeps of its parent; `values` say where each came from. Without a target, what only it could
    tell is left open.

    Raises RecipeError for a parent that cannot be this target's, or leaves open what the recipe does not state either.
    """
    word = read.train.init_from
    if word is None:
        return read
    f = facts_of(word, target)
    if target:
        _refuse_misfit(word, f, target)
    theirs = {key: _theirs(f, name) for key, name in KEYS.items()}
    for key, name in KEYS.items():
        mine, fact = values[key], f.card[name]
        said = mine.source != "default" and mine.value != "auto"
        if said and (not fact.known or mine.value != theirs[key]):
            has = f"has {theirs[key]}" if fact.known else "does not say it"
            values[key] = Value(mine.value, mine.source, f"the recipe says so; {word} {has}")
        elif fact.known:
            values[key] = Value(theirs[key], "derived", f"kept from {word}, from which training starts")
        elif target:
            raise RecipeError(
                f'"train.init_from": {word} does not state its {FIELDS[name]} ({fact.where}). Set {key} to what it was trained with; '
                f"eyas check {f.config_file.parent} --target {target.folder} --probe finds it out."
            )
    layers = values["target.aux_layers"].value
    if f.card["aux_layers"].known and len(layers) != len(f.card["aux_layers"].value):
        raise RecipeError(
            f'"target.aux_layers" is {layers}, and {word} takes the states of {len(f.card["aux_layers"].value)} layers. '
            "Leave the key out, or name as many."
        )
    layer = f.card["architecture"]
    if layer.known and values["train.architecture"].value != layer.value:
        raise RecipeError(
            f'"train.architecture" is {values["train.architecture"].value}, and the layer of {word} is {layer.value}: weights of one are not '
            "weights of the other. Leave the key out, or start from nothing (train.init_from: null)."
        )
    norms = {name: values[f"train.norms.{name}"].value for name in ("before_residual", "fc", "output", "qk")}
    train = read.train.model_copy(
        update={
            "draft_vocab": values["train.draft_vocab"].value,
            "architecture": values["train.architecture"].value,
            "norms": read.train.norms.model_copy(update=norms),
        }
    )
    return read.model_copy(
        update={"train": train, "target": read.target.model_copy(update={"aux_layers": layers})}
    )


def without_inherited(body: dict[str, Any], values: dict[str, Value]) -> dict[str, Any]:
    """A recipe's body without what its parent decided: read again, it must not be taken for the recipe's own word."""
    for key in KEYS if body["train"]["init_from"] else ():
        if values[key].source == "derived":
            *sections, name = key.split(".")
            part = body
            for section in sections:
                part = part[section]
            part.pop(name, None)
    return body


def _theirs(f: Facts, name: str) -> Any:
    value = f.card[name].value
    if name == "fed_back":
        return value == "normed"
    return list(value) if isinstance(value, tuple) else value


def _refuse_misfit(word: str, f: Facts, target: Target) -> None:
    """Before anything costs time: a parent that cannot belong to the target."""
    if f.contract:
        for name, theirs, ours in contracts.misfits(f.contract, target):
            raise RecipeError(
                f'"train.init_from": {name}: the drafter {word} expects {theirs}, {target.folder} has {ours}. '
                "It was raised for another target; start from nothing (train.init_from: null) or from another drafter."
            )
    elif why := facts.cannot(f, target):
        raise RecipeError(
            f'"train.init_from": {word} cannot be trained by eyas for {target.folder}: {"; ".join(why)}.'
        )


def given(resolved: Resolved) -> dict[str, Any]:
    """What the recipe states of its parent, for fields that the folder leaves open."""
    norms = resolved.recipe.train.norms
    return {
        "aux_layers": tuple(resolved.aux_layers), "before_residual": norms.before_residual, "fc_norm": norms.fc,
        "fed_back": "normed" if norms.output else "hidden", "qk_norm": norms.qk,
    }  # fmt: skip


def contract(resolved: Resolved, longest: int, draft_vocab: int | None = None) -> Contract:
    """The contract of the drafter that training will make: a new one for the target, or the parent's for this target with the
    recipe's own word on norms, aux layers and vocabulary, and the longer of both trainings."""
    options, target = resolved.recipe.train, resolved.target
    norms = Norms(**options.norms.model_dump())
    size = min(draft_vocab or options.draft_vocab, target.vocab)
    if options.init_from is None:
        return contracts.for_target(
            target, resolved.aux_layers, norms, size, options.ttt_steps, longest, options.architecture
        )
    old = facts.contract_of(facts_of(options.init_from, target), target, given(resolved))
    return contracts.renewed(old, target, resolved.aux_layers, norms, size, options.ttt_steps, longest)


def content(word: str) -> str:
    """What a parent's folder holds, as a short hash: config and weights."""
    f = facts_of(word, None)
    files = sorted({t.file for t in f.weights.tensors.values()})
    return fingerprint([file_hash(p) for p in (f.config_file, *files)])
