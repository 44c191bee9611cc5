"""What a drafter assumes, field by field: written beside its weights, compared wherever it is used.

drafter/best/contract.json says it of a drafter that eyas trained. Of any other, the same fields are a card: what is stated, what
follows from something, and what is unknown, which is never guessed (drafter/disk.py reads it).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import ContractError
from eyas.target import Target


@dataclass(frozen=True)
class Norms:
    """Where norms sit. before_residual: the residual is hidden_norm(h) instead of h. fc: none | chunks (one RMSNorm per
    aux state) | whole (one over all). output: norm(h) instead of h is fed to the next draft step (EAGLE-3.1). qk: an RMSNorm of each
    head of queries and keys before they are rotated (Qwen3)."""

    before_residual: bool
    fc: str
    output: bool
    qk: bool = False


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention (MLA, arXiv 2405.04434): what queries, keys and values are compressed to; of a query's or key's head,
    the part without and the part with rotary positions; a value's head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


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
    rope_scaling: dict[str, Any] | None = None  # rope_type and its parameters, as in config.json
    rope_partial: float = 1.0  # the share of a head that is rotated
    latent: Latent | None = None  # of architecture eagle3-mla; head_dim is then the width of a value's head

    @property
    def rope(self) -> "Rope":
        return Rope(self.rope_theta, scaling_of(self.rope_scaling or {}), self.rope_partial)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class Fact(NamedTuple):
    """One field's value and where it comes from. source: stated | derived | unknown (value is None)."""

    value: Any
    source: str
    where: str

    @property
    def known(self) -> bool:
        return self.source != "unknown"


Card = dict[str, Fact]  # by the names in FIELDS

FIELDS = {
    "architecture": "the drafter's layer",
    "depth": "its number of layers",
    "target_layers": "layers of the target",
    "aux_layers": "aux layers (id i = input of layer i)",
    "fc_norm": "norm of the aux states before fc",
    "before_residual": "residual is the normed state",
    "fed_back": "fed to the next draft step",
    "hidden": "width",
    "target_hidden": "width of the target",
    "mlp": "width of the MLP",
    "heads": "attention heads",
    "kv_heads": "key/value heads",
    "head_dim": "width of a head",
    "latent": "ranks and widths of latent attention",
    "qk_norm": "norms of queries and keys",
    "bias": "biases of q, k, v",
    "activation": "activation",
    "eps": "epsilon of the norms",
    "rope": "rope",
    "window": "attention window",
    "context": "positions that the config promises",
    "trained_length": "longest row seen in training",
    "vocab": "vocabulary of the target",
    "draft_vocab": "vocabulary of the drafter",
    "map": "vocabulary map",
    "head": "output head",
    "embedding": "embedding",
    "dtype": "type of the weights",
    "quantisation": "quantisation",
}


class Rope(NamedTuple):
    """Rotary positions. scaling: kind and parameters, in order of names; partial: the share of a head that is rotated."""

    theta: float
    scaling: tuple[tuple[str, Any], ...] = ()
    partial: float = 1.0

    def __str__(self) -> str:
        said = [f"theta {self.theta:g}", *(f"{name} {value}" for name, value in self.scaling)]
        return ", ".join(said + ([f"{self.partial:.0%} of a head"] if self.partial != 1 else []))

    def scaling_dict(self) -> dict[str, Any]:
        """The scaling as a config.json has it; empty where there is none."""
        return {
            ("rope_type" if k == "kind" else k): (list(x) if isinstance(x, tuple) else x)
            for k, x in self.scaling
        }


SCALINGS = ("linear", "llama3", "yarn")  # whose frequencies do not depend on the length of a request
NOT_SCALING = {"rope_theta", "type", "rope_type", "partial_rotary_factor"}


def scaling_of(d: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Rope.scaling of a config's rope_scaling or rope_parameters."""
    kind = d.get("rope_type", d.get("type", "default"))
    if kind in ("default", None):
        return ()
    rest = sorted((str(k), v) for k, v in d.items() if k not in NOT_SCALING)
    return (("kind", str(kind)), *((k, tuple(v) if isinstance(v, list) else v) for k, v in rest))


def card(c: Contract) -> Card:
    """The card of a contract: all of it is stated."""
    values = {
        "architecture": c.architecture.removeprefix("eagle3-"), "depth": 1, "target_layers": c.target_layers,
        "aux_layers": c.aux_layers, "fc_norm": c.norms.fc, "before_residual": c.norms.before_residual,
        "fed_back": "normed" if c.norms.output else "hidden", "hidden": c.hidden, "target_hidden": c.hidden, "mlp": c.mlp,
        "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "latent": astuple(c.latent) if c.latent else None, "qk_norm": c.norms.qk, "bias": False, "activation": "silu",
        "eps": c.eps, "rope": c.rope, "window": None, "context": c.context, "trained_length": c.trained_length,
        "vocab": c.vocab, "draft_vocab": c.draft_vocab, "map": "offsets" if c.draft_vocab < c.vocab else "all",
        "head": c.head, "embedding": c.embedding, "dtype": c.dtype, "quantisation": None,
    }  # fmt: skip
    return {name: Fact(value, "stated", "contract.json") for name, value in values.items()}


def for_target(
    target: Target,
    aux_layers: list[int],
    norms: Norms,
    draft_vocab: int,
    ttt_steps: int,
    trained_length: int,
    architecture: str = "llama",
) -> Contract:
    """The contract of a new drafter: its shape follows the target's. architecture: llama, or mla for a target with latent attention."""
    made = Contract(
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
    return _latent(made, target) if architecture == "mla" else made


def _latent(c: Contract, target: Target) -> Contract:
    """With latent attention in the target's widths, and the target's rope with its scaling, by which vLLM scales the scores too."""
    config = target.config
    rank = config["kv_lora_rank"]
    widths = (config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = Latent(config.get("q_lora_rank") or 3 * rank, rank, *widths)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    said = Rope(c.rope_theta, scaling_of(scaling)).scaling_dict()
    return replace(
        c,
        architecture="eagle3-mla",
        latent=latent,
        kv_heads=c.heads,
        head_dim=latent.value,
        rope_scaling=said or None,
    )


def renewed(
    c: Contract,
    target: Target,
    aux_layers: list[int],
    norms: Norms,
    draft_vocab: int,
    ttt_steps: int,
    trained_length: int,
) -> Contract:
    """The contract of a drafter that was trained on, for this target: its shape and rope are kept."""
    return replace(
        c, target_model_type=target.model_type, target_fingerprint=target.fingerprint, target_identity=target.identity,
        target_layers=target.layers, stop_ids=target.stop_ids, aux_layers=tuple(aux_layers), norms=norms, draft_vocab=draft_vocab,
        trained_length=max(c.trained_length, trained_length), ttt_steps=max(c.ttt_steps, ttt_steps),
    )  # fmt: skip


def misfits(c: Contract, target: Target) -> list[tuple[str, Any, Any]]:
    """What a drafter of this contract and a target must share and do not: name, the drafter's, the target's."""
    pairs = (
        ("hidden size", c.hidden, target.hidden),
        ("vocabulary", c.vocab, target.vocab),
        ("number of layers", c.target_layers, target.layers),
        ("stop ids", c.stop_ids, target.stop_ids),
    )
    return [pair for pair in pairs if pair[1] != pair[2]]


def _wrong(c: Contract) -> str | None:
    """The first field that is not what the class says, or None."""
    kinds = {"int": int, "float": float | int, "str": str, "bool": bool, "Norms": Norms}
    holders: list[Contract | Norms | Latent] = [c, c.norms, *([c.latent] if c.latent else [])]
    for holder in holders:
        for about in fields(holder):
            value = getattr(holder, about.name)
            if about.name == "latent":
                continue
            if about.name == "rope_scaling":
                if value is not None and not isinstance(value, dict):
                    return f"rope_scaling is {value!r:.60}"
                continue
            if about.type == tuple[int, ...] or str(about.type).startswith("tuple"):
                good = all(type(x) is int for x in value)
            else:
                name = about.type if isinstance(about.type, str) else about.type.__name__
                good = isinstance(value, kinds[name]) and (name == "bool" or not isinstance(value, bool))
            if not good or (isinstance(value, int | float) and not abs(value) < 2**60):
                return f"{about.name} is {value!r:.60}"
    return None


def read(path: Path) -> Contract:
    """Raises ContractError when contract.json is missing, incomplete or has unknown fields."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        norms = Norms(**raw.pop("norms"))
        raw |= {name: tuple(raw[name]) for name in ("aux_layers", "stop_ids")}
        if latent := raw.get("latent"):
            raw["latent"] = Latent(**latent)
        found = Contract(norms=norms, **raw)
        if wrong := _wrong(found):
            raise TypeError(wrong)
        return found
    except FileNotFoundError as e:
        raise ContractError(f"{path} is missing: what the drafter assumes is unknown.") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ContractError(f"{path} is not a contract that this version of eyas reads: {e}") from e
