"""What there is to know of a drafter's folder before any rule looks at it: config, tensors, the card, eyas's own contract, the target.

Torch is not imported, no tensor but the few small ones is read, and no file is opened that the folder does not list itself (links, as a
download cache makes them, are followed).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eyas import contract as contracts
from eyas.contract import FIELDS, SCALINGS, Card, Contract, Latent, Norms, Rope
from eyas.drafter import cards
from eyas.drafter.cards import Reading
from eyas.drafter.dialects import Folder, Shape
from eyas.errors import ContractError
from eyas.stores import weights
from eyas.stores.weights import Weights
from eyas.target import Target

OPEN = ("aux_layers", "fc_norm", "before_residual", "fed_back", "rope")  # what a probe can tell
NEEDED = ("depth", "hidden", "mlp", "heads", "kv_heads", "head_dim", "eps", "vocab", "draft_vocab", *OPEN)


@dataclass(frozen=True)
class Facts:
    """reading: what config and tensors say, in their dialect. contract: what eyas trained, where it did."""

    path: Path
    weights: Weights
    folder: Folder
    reading: Reading
    contract: Contract | None
    target: Target | None

    @property
    def config(self) -> dict[str, Any]:
        return self.folder.config

    @property
    def config_file(self) -> Path:
        return (self.path.parent if self.path.is_file() else self.path) / "config.json"

    @property
    def card(self) -> Card:
        """What the drafter was trained with, as far as it is known."""
        return contracts.card(self.contract) if self.contract else self.reading.card

    @cached_property
    def names(self) -> dict[str, str]:
        """Canonical name -> name on disk."""
        return self.folder.names()

    @cached_property
    def small(self) -> dict[str, np.ndarray]:
        """Values of d2t and t2d, where they are there and can be read."""
        out: dict[str, np.ndarray] = {}
        for name in ("d2t", "t2d"):
            if name in self.names and len(self.weights.tensors[self.names[name]].shape) == 1:
                out[name] = self.weights.values(self.names[name])
        return out


def gather(path: Path, target: Target | None) -> Facts:
    """Read a drafter's folder, or one safetensors file with the config.json beside it. Raises ContractError where it cannot be read at all."""
    config = weights.read_json((path.parent if path.is_file() else path) / "config.json")
    held = weights.of_file(path) if path.is_file() else weights.opened(path)
    if not held.tensors:
        raise ContractError(_nothing(path, held))
    folder = Folder(config, {n: Shape(t.dtype, t.shape) for n, t in held.tensors.items()}, target)
    beside = (path.parent if path.is_file() else path) / "contract.json"
    own = contracts.read(beside) if beside.is_file() else None
    return Facts(path, held, folder, cards.read(folder), own, target)


def _nothing(path: Path, held: Weights) -> str:
    if held.problems:
        return "; ".join(held.problems[:5])
    if held.pickles:
        return (
            f"{path} holds its weights as a pickle ({', '.join(held.pickles[:3])}), which can run code when it is read: eyas opens none. "
            "Convert it to safetensors where you trust it."
        )
    return f"{path} holds no *.safetensors"


def cannot(f: Facts, target: Target) -> list[str]:
    """Why a drafter is none that our network computes, one sentence each."""
    v = {name: fact.value for name, fact in f.card.items()}
    out = []
    if v["architecture"] == "mla" and not f.card["latent"].known:
        out.append(f"{FIELDS['latent']}: {f.card['latent'].where}")
    if v["depth"] not in (1, None):
        out.append(f"it has {v['depth']} layers")
    for name in ("bias", "window", "quantisation"):
        if v[name]:
            out.append(f"{FIELDS[name]}: {v[name]}")
    if v["activation"] not in ("silu", None):
        out.append(f"its activation is {v['activation']}")
    if v["rope"] and v["rope"].scaling and dict(v["rope"].scaling)["kind"] not in SCALINGS:
        out.append(f"its rope is scaled by {dict(v['rope'].scaling)['kind']}")
    for name in ("hidden", "target_hidden"):
        if v[name] not in (target.hidden, None):
            out.append(f"{FIELDS[name]} is {v[name]}, and the target's is {target.hidden}")
    if v["vocab"] not in (target.vocab, None):
        out.append(f"its vocabulary has {v['vocab']:,} ids of the target, and the target's {target.vocab:,}")
    return out


def contract_of(f: Facts, target: Target, given: Mapping[str, Any] | None = None) -> Contract:
    """The contract that a folder's card comes to, for this target; that of eyas's own training where it is there.

    given: values of fields that the card leaves open. Raises ContractError for what our network does not compute, and
    names all that stays unknown.
    """
    if why := cannot(f, target):
        raise ContractError(f"{f.path} cannot be computed by eyas: {'; '.join(why)}.")
    if f.contract:
        return f.contract
    card, given = f.card, given or {}
    open_ = [f"{FIELDS[n]} ({card[n].where})" for n in NEEDED if not card[n].known and given.get(n) is None]
    if open_:
        raise ContractError(f"{f.path} does not say all that it needs: {'; '.join(open_)}.")
    v: dict[str, Any] = {n: card[n].value if card[n].known else given.get(n) for n in FIELDS}
    rope: Rope = v["rope"]
    return Contract(
        target_model_type=target.model_type, target_fingerprint=target.fingerprint, target_identity=target.identity,
        target_layers=target.layers, hidden=v["hidden"], mlp=v["mlp"], heads=v["heads"], kv_heads=v["kv_heads"],
        head_dim=v["head_dim"], vocab=v["vocab"], draft_vocab=v["draft_vocab"], eps=v["eps"], rope_theta=rope.theta,
        context=v["context"] or target.context, trained_length=0, aux_layers=tuple(v["aux_layers"]),
        norms=Norms(v["before_residual"], v["fc_norm"], v["fed_back"] == "normed", bool(v["qk_norm"])), ttt_steps=1,
        stop_ids=target.stop_ids,
        dtype=v["dtype"] if v["dtype"] in ("float32", "float16", "bfloat16") else "bfloat16",
        rope_scaling=rope.scaling_dict() or None, rope_partial=rope.partial,
        architecture=f"eagle3-{v['architecture']}", latent=Latent(*v["latent"]) if v["latent"] else None,
    )  # fmt: skip
