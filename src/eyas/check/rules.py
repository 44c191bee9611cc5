"""The rules that a drafter folder must pass: names, shapes, vocabulary map, layer ids, config against contract, target.

Each rule is a function of Facts and yields findings; a healthy drafter yields none.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas import contract as contracts
from eyas.causes import Finding
from eyas.contract import Contract
from eyas.drafter import dialects
from eyas.errors import ContractError
from eyas.target import Target


@dataclass(frozen=True)
class Facts:
    folder: Path
    config: dict[str, Any]
    contract: Contract
    tensors: dict[str, Tensor]
    target: Target | None


def gather(folder: Path, target: Target | None) -> Facts:
    """Read a drafter folder. Raises ContractError where it cannot be read at all."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ContractError(f"{folder}/config.json cannot be read ({e}); is this a drafter folder?") from e
    return Facts(
        folder, config, contracts.read(folder / "contract.json"), dialects.tensors_of(folder), target
    )


def tensors_fit(f: Facts) -> Iterator[Finding]:
    for problem in dialects.misfits(f.tensors, f.contract):
        yield Finding(
            "tensors", "error", f"{f.folder}/model.safetensors: {problem}; the engine would leave it random"
        )


def values_finite(f: Facts) -> Iterator[Finding]:
    for name, tensor in f.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield Finding(
                "finite", "error", f"{f.folder}/model.safetensors: {name} holds NaN or infinity; train again"
            )


def config_says_contract(f: Facts) -> Iterator[Finding]:
    for key, value in dialects.config(f.contract).items():
        found = f.config.get(key, "nothing")
        if found != value:
            yield Finding(
                "config",
                "error",
                f"{f.folder}/config.json: {key} is {found!r}, the drafter was trained with {value!r}",
            )


def vocabulary_map(f: Facts) -> Iterator[Finding]:
    d2t, t2d, c = f.tensors.get("d2t"), f.tensors.get("t2d"), f.contract
    if d2t is None or t2d is None:
        return  # tensors_fit names them
    where = f"{f.folder}/model.safetensors: d2t"
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        yield Finding("vocabulary", "error", f"{where} is {d2t.dtype}, t2d {t2d.dtype}; need int64 and bool")
        return
    kept = torch.arange(len(d2t)) + d2t
    if torch.equal(d2t, t2d.nonzero().flatten()) and not torch.equal(kept, d2t):
        yield Finding(
            "vocabulary", "error", f"{where} holds absolute ids; engines add arange, so subtract it"
        )
    elif bool((kept < 0).any()) or bool((kept >= c.vocab).any()):
        yield Finding(
            "vocabulary",
            "error",
            f"{where} maps to ids outside 0..{c.vocab - 1}; offsets must stay inside the target vocabulary",
        )
    elif not bool((kept.diff() > 0).all()):
        yield Finding(
            "vocabulary", "error", f"{where} is not strictly increasing after adding arange: ids repeat"
        )
    elif not torch.equal(kept, t2d.nonzero().flatten()):
        yield Finding("vocabulary", "error", f"{where} and t2d keep different ids")
    lost = [i for i in c.stop_ids if i < len(t2d) and not bool(t2d[i])]
    if lost:
        yield Finding(
            "vocabulary",
            "error",
            f"{where}: stop ids {lost} are outside the draft vocabulary; ends are never drafted",
        )


def layer_ids(f: Facts) -> Iterator[Finding]:
    ids, n = list(f.contract.aux_layers), f.contract.target_layers
    if sorted(set(ids)) != ids or not ids or ids[0] < 0 or ids[-1] > n:
        yield Finding(
            "layers", "error", f"{f.folder}/contract.json: aux layers {ids} are not ascending ids in 0..{n}"
        )


def same_target(f: Facts) -> Iterator[Finding]:
    if f.target is None:
        yield Finding("target", "info", "no target given (--target DIR): the drafter is checked alone")
        return
    t, c = f.target, f.contract
    for name, ours, theirs in contracts.misfits(c, t):
        yield Finding("target", "error", f"{name}: the drafter expects {ours}, {t.folder} has {theirs}")
    if c.target_fingerprint != t.fingerprint:
        yield Finding(
            "target",
            "warning",
            f"the drafter was trained for {c.target_identity} ({c.target_fingerprint}); {t.folder} is {t.identity} "
            f"({t.fingerprint}): other weights, tokenizer or template lower acceptance",
        )


def loads(f: Facts) -> Iterator[Finding]:
    try:
        dialects.read(f.folder)
    except (ContractError, RuntimeError) as e:
        yield Finding("load", "error", f"{f.folder} does not load: {e}")


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    tensors_fit,
    values_finite,
    config_says_contract,
    vocabulary_map,
    layer_ids,
    same_target,
    loads,
)


def check(folder: Path, target: Target | None) -> list[Finding]:
    """Every finding of every rule. A folder that cannot be read is one error."""
    try:
        facts = gather(folder, target)
    except ContractError as e:
        return [Finding("read", "error", str(e))]
    return [finding for rule in RULES for finding in rule(facts)]
