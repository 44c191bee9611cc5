"""train/state/state.safetensors: float32 weights, what the optimizer remembers of each, and the place in the schedule, in one file.

One file is one rename: after a kill the run continues from a whole state. No random state is kept since none is used
between steps (no dropout; the order of rows is a function of seed and epoch).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas.drafter.network import Drafter
from eyas.errors import ContractError
from eyas.rundir import atomic
from eyas.stores import tensors as tensor_files
from eyas.train.optimizer import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # two of AdamW, one of Muon


def save(path: Path, drafter: Drafter, optimizer: Optimizer, place: dict[str, Any]) -> None:
    tensors, state = {"d2t_W": drafter.d2t_W}, optimizer.state
    for name, parameter in drafter.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        held = state.get(parameter, {})
        tensors |= {f"{moment}.{name}": held[moment] for moment in MOMENTS if moment in held}
    with atomic(path) as tmp:
        tensor_files.save(
            {n: t.cpu().contiguous() for n, t in tensors.items()}, tmp, {"place": json.dumps(place)}
        )


def load(path: Path, drafter: Drafter, optimizer: Optimizer) -> dict[str, Any]:
    """Restore weights and moments in place; returns the place. Raises ContractError when the file is broken."""
    try:
        with safe_open(path, framework="pt") as f:
            place = json.loads(f.metadata()["place"])
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
        with torch.no_grad():
            drafter.d2t_W.copy_(tensors["d2t_W"])
            for name, parameter in drafter.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                moments = {m: tensors[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in tensors}
                if moments:
                    applied = place["step"] - place.get("skips", {}).get("count", 0)
                    optimizer.restore(parameter, moments, applied)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ContractError(
            f"{path}: not a readable training state ({e}). Train again with --from train."
        ) from e
    return place
