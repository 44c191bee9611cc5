"""What a drafter assumes, field by field: written beside its weights, compared wherever it is used.

drafter/best/contract.json
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ContractError
from eyas.target import Target


@dataclass(frozen=True)
class Norms:
    """Where norms sit. before_residual: the residual is hidden_norm(h) instead of h. fc: none | chunks (one RMSNorm per
    aux state) | whole (one over all). output: norm(h) instead of h is fed to the next draft step (EAGLE-3.1)."""

    before_residual: bool
    fc: str
    output: bool


@dataclass(frozen=True)
class Contract:
    """The drafter's shape and every convention that a served model must share with its training."""

    target_model_type: str
    target_fingerprint: str
    target_identity: str
    target_layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    eps: float
    rope_theta: float
    context: int  # positions that the config promises
    trained_length: int  # longest row seen in training
    aux_layers: tuple[int, ...]  # id i = input of layer i; n = last output before the final norm
    norms: Norms
    ttt_steps: int
    stop_ids: tuple[int, ...]
    dtype: str = "bfloat16"
    architecture: str = "eagle3-llama"
    embedding: str = "target"  # shared with the target, not stored
    head: str = "own"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def for_target(
    target: Target, aux_layers: list[int], norms: Norms, draft_vocab: int, ttt_steps: int, trained_length: int
) -> Contract:
    """The contract of a new drafter: its shape follows the target's."""
    return Contract(
        target_model_type=target.model_type,
        target_fingerprint=target.fingerprint,
        target_identity=target.identity,
        target_layers=target.layers,
        hidden=target.hidden,
        mlp=target.mlp,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab=target.vocab,
        draft_vocab=min(draft_vocab, target.vocab),
        eps=target.eps,
        rope_theta=target.rope_theta,
        context=target.context,
        trained_length=trained_length,
        aux_layers=tuple(aux_layers),
        norms=norms,
        ttt_steps=ttt_steps,
        stop_ids=target.stop_ids,
    )


def misfits(c: Contract, target: Target) -> list[tuple[str, Any, Any]]:
    """What a drafter of this contract and a target must share and do not: name, the drafter's, the target's."""
    pairs = (
        ("hidden size", c.hidden, target.hidden),
        ("vocabulary", c.vocab, target.vocab),
        ("number of layers", c.target_layers, target.layers),
        ("stop ids", c.stop_ids, target.stop_ids),
        ("rope theta", c.rope_theta, target.rope_theta),
    )
    return [pair for pair in pairs if pair[1] != pair[2]]


def read(path: Path) -> Contract:
    """Raises ContractError when contract.json is missing, incomplete or has unknown fields."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        norms = Norms(**raw.pop("norms"))
        raw |= {name: tuple(raw[name]) for name in ("aux_layers", "stop_ids")}
        return Contract(norms=norms, **raw)
    except FileNotFoundError as e:
        raise ContractError(f"{path} is missing: what the drafter assumes is unknown.") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ContractError(f"{path} is not a contract that this version of eyas reads: {e}") from e
