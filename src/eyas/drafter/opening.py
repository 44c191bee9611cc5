"""Anybody's drafter as our network: the weights bit for bit, under the conventions that its folder states.

    found = facts.gather(folder, target);  held = opening.read(found, target);  drafter = held.drafter

What the folder leaves open is unknown: `read` refuses it, `assumed` fills it in for a probe, which then tells.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.contract import Card, Contract, Rope
from eyas.drafter import facts
from eyas.drafter.architectures import build
from eyas.drafter.disk import names
from eyas.drafter.facts import OPEN, Facts
from eyas.drafter.network import Drafter
from eyas.errors import ContractError
from eyas.target import Target

SAMPLED_ROWS = 4096  # of the embedding, to tell whether it is the target's


class Held(NamedTuple):
    """A drafter that was opened. embedding_VD: its own where it has another than the target's, float32."""

    drafter: Drafter  # float32, on the CPU
    embedding_VD: Tensor
    own_embedding: bool


def assumed(card: Card, target: Target) -> dict[str, Any]:
    """What to begin with for each field that a probe can tell and the card leaves open."""
    n = target.layers
    guesses = {
        "aux_layers": (2, n // 2, n - 3), "fc_norm": "chunks", "before_residual": False, "fed_back": "hidden",
        "rope": Rope(target.rope_theta),
    }  # fmt: skip
    return {name: guesses[name] for name in OPEN if not card[name].known}


def read(f: Facts, target: Target, given: Mapping[str, Any] | None = None) -> Held:
    """Open a drafter for its target. Raises ContractError as contract_of does, and where a tensor is missing or of another shape."""
    c = facts.contract_of(f, target, given)
    held = tensors(f)
    drafter = build(replace(c, norms=replace(c.norms, fc=_norms_there(f))))
    drafter.load_state_dict(_state(f, drafter, held, target))
    norms_set(drafter, c.norms.fc)
    drafter.contract = c
    own = held.get("embed_tokens.weight")
    theirs = target.embedding_VD()
    if own is None or same_rows(own, theirs):
        return Held(drafter.eval(), theirs.float(), False)
    return Held(drafter.eval(), own.float(), True)


def tensors(f: Facts) -> dict[str, Tensor]:
    """All tensors by their canonical names, as they are stored."""
    out: dict[str, Tensor] = {}
    by_file: dict[Any, list[str]] = {}
    for canonical, disk in f.names.items():
        by_file.setdefault(f.weights.tensors[disk].file, []).append(canonical)
    for path, group in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                out |= {canonical: file.get_tensor(f.names[canonical]) for canonical in group}
        except (SafetensorError, OSError) as e:
            raise ContractError(f"{path} is not a readable safetensors file ({e}).") from e
    return out


def kept_ids(f: Facts, held: Mapping[str, Tensor], c: Contract) -> Tensor:
    """[W] target id of each draft id, by the offsets of d2t; the ids themselves where there is no map.

    Raises ContractError where the map is of another length or leaves the vocabulary.
    """
    if "d2t" not in held:
        return torch.arange(c.draft_vocab)
    d2t = held["d2t"].long()
    if d2t.shape != (c.draft_vocab,):
        raise ContractError(f"{f.path}: d2t has shape {tuple(d2t.shape)}, expected {(c.draft_vocab,)}")
    return torch.arange(c.draft_vocab) + d2t


def same_rows(own_VD: Tensor, theirs_VD: Tensor) -> bool:
    """Whether an embedding is the target's, in its own type; some thousand rows are compared."""
    if own_VD.shape != theirs_VD.shape:
        return False
    at = torch.arange(0, len(own_VD), max(1, len(own_VD) // SAMPLED_ROWS))
    return bool(torch.equal(own_VD[at].float(), theirs_VD[at].to(own_VD.dtype).float()))


def norms_set(drafter: Drafter, kind: str) -> None:
    """Take the norms before fc that are of another kind out of the network."""
    if kind != "chunks":
        drafter.fc_norm = torch.nn.ModuleList()
    if kind != "whole":
        drafter.input_norm = None


def _norms_there(f: Facts) -> str:
    return (
        "chunks" if "fc_norm.0.weight" in f.names else "whole" if "input_norm.weight" in f.names else "none"
    )


def _state(f: Facts, drafter: Drafter, held: Mapping[str, Tensor], target: Target) -> dict[str, Tensor]:
    c = drafter.contract
    kept = kept_ids(f, held, c)
    wanted = {ours: tuple(p.shape) for ours, p in drafter.state_dict().items()}
    out: dict[str, Tensor] = {"d2t_W": kept - torch.arange(len(kept))}
    for ours, disk in names(c).items():
        found = held.get(disk)
        if found is None and disk == "lm_head.weight" and c.draft_vocab == c.vocab:
            found = target.head_VD()
        if found is None:
            raise ContractError(f'{f.path}: tensor "{disk}" is missing')
        if tuple(found.shape) != wanted[ours]:
            raise ContractError(
                f'{f.path}: tensor "{disk}" has shape {tuple(found.shape)}, expected {wanted[ours]}{_meaning(disk, c)}'
            )
        out[ours] = found.float()
    return out


def _meaning(disk: str, c: Contract) -> str:
    if ".self_attn." in disk:
        return f" ({c.heads} heads, {c.kv_heads} key/value heads, head_dim {c.head_dim})"
    if ".mlp." in disk:
        return f" (intermediate_size {c.mlp})"
    return f" ({len(c.aux_layers)} aux layers)" if disk == "fc.weight" else ""
