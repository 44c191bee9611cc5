"""How like two computations of the same states are: by layer, and whether a slot has moved.

Errors are relative to each row's own size; cosines are of rows with their mean taken off. Seen so far: engines that round differently
part by at most two hundredths with a cosine of 0.9998 or more, and rows held against their neighbours have one of 0.2 to 0.7.
"""

from typing import Any

import torch
from torch import Tensor

from eyas.stores.states import RowStates

SHIFTS = (-1, 0, 1)
MIN_COSINE = 0.98  # mean over rows, of a layer


def compare(pairs: list[tuple[RowStates, RowStates, range]], layers: list[int]) -> dict[str, Any] | None:
    """Of (found, reference, positions): mean cosine and relative error of each layer, "last" too, and the mean cosine when
    found is held against the reference one position earlier, at its place, and one later; None where no position is left."""
    names = [*map(str, layers), "last"]
    cosine: dict[str, list[Tensor]] = {n: [] for n in names}
    error: dict[str, list[Tensor]] = {n: [] for n in names}
    shifted: dict[int, list[Tensor]] = {s: [] for s in SHIFTS}
    for found, reference, positions in pairs:
        at = torch.tensor([p for p in positions if 1 <= p < len(reference) - 2], dtype=torch.long)
        for name in names:
            a, b = _layer(found, name, layers), _layer(reference, name, layers)
            some = at[at > max(found.last_from, reference.last_from)] if name == "last" else at
            here, there = (some - r.last_from if name == "last" else some for r in (found, reference))
            cosine[name].append(_cosine(a[here], b[there]))
            error[name].append((a[here] - b[there]).norm(dim=-1) / b[there].norm(dim=-1).clamp_min(1e-9))
            for s in SHIFTS:
                shifted[s].append(_cosine(a[here], b[there + s]))
    if not sum(len(c) for c in cosine["last"]):
        return None
    return {
        "rows": len(pairs),
        "positions": int(sum(len(c) for c in cosine["last"])),
        "cosine": {n: float(torch.cat(c).mean()) for n, c in cosine.items()},
        "relative_error": {n: float(torch.cat(e).median()) for n, e in error.items()},
        "shifts": {str(s): float(torch.cat(c).mean()) for s, c in shifted.items()},
    }


def _layer(row: RowStates, name: str, layers: list[int]) -> Tensor:
    return (row.last_SD if name == "last" else row.aux_TLD[:, layers.index(int(name))]).float()


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def differs(found: dict[str, Any]) -> str | None:
    """Why a comparison shows that the states are not the same, or None."""
    best = max(found["shifts"], key=lambda s: found["shifts"][s])
    if best != "0":
        return f"they fit best one position {'later' if best == '1' else 'earlier'} ({found['shifts'][best]:.3f} against {found['shifts']['0']:.3f} in place)"
    worst = min(found["cosine"], key=lambda n: found["cosine"][n])
    if not found["cosine"][worst] >= MIN_COSINE:
        return f"layer {worst} has a mean cosine of {found['cosine'][worst]:.3f} (need {MIN_COSINE})"
    return None


def shown(found: dict[str, Any]) -> str:
    """One line for the screen."""
    errors = found["relative_error"].values()
    beside = max(found["shifts"]["-1"], found["shifts"]["1"])
    return (
        f"cosine at least {min(found['cosine'].values()):.4f} by layer, relative error {min(errors):.1g} to {max(errors):.1g}; "
        f"one position beside: {beside:.2f} ({found['positions']:,} positions)"
    )
