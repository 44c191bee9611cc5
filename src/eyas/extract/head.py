"""What the ways to extract share: what they leave, and the target's final norm and head as read from the weights on disk."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.recipe import Resolved
from eyas.rundir import file_hash
from eyas.stores import states
from eyas.target import ONE_PLUS_WEIGHT


class Extracted(NamedTuple):
    """What a way of extracting leaves for the manifest."""

    shards: list[dict[str, Any]]
    counts: Counter[str]
    likeness: dict[str, Any]  # to other computations of the same states
    made: int  # tokens that this process got, and the seconds it took
    seconds: float


def described(path: Path) -> dict[str, Any]:
    """A shard as the manifest names it."""
    rows = states.rows_of(path)
    return {"file": path.name, "sha256": file_hash(path), "rows": len(rows), "tokens": sum(map(len, rows))}


class Checker(NamedTuple):
    """Head and final norm as read from the weights on disk, not from the running model."""

    head_VD: Tensor
    norm_D: Tensor
    eps: float
    one_plus: bool


def checker_of(resolved: Resolved) -> Checker:
    """Read from the weights on disk."""
    target = resolved.target
    head = target.head_VD().to(resolved.device, getattr(torch, resolved.dtype))
    return Checker(
        head, target.final_norm_D().to(resolved.device), target.eps, target.model_type in ONE_PLUS_WEIGHT
    )


def own_logits(checker: Checker, last_TD: Tensor) -> Tensor:
    """Final norm and head, rounded as the family's own code rounds: the norm is cast before the scale, except where the
    scale is (1 + w)."""
    dtype = checker.head_VD.dtype
    normed = F.rms_norm(last_TD.float(), (last_TD.shape[-1],), None, checker.eps)
    if checker.one_plus:
        return (normed * checker.norm_D).to(dtype) @ checker.head_VD.T
    return (normed.to(dtype) * checker.norm_D.to(dtype)) @ checker.head_VD.T
