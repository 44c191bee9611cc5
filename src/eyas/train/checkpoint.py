"""train/state/state.safetensors: float32 weights, both AdamW moments, and the place in the schedule, in one file.

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

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, drafter: Drafter, optimizer: torch.optim.AdamW, place: dict[str, Any]) -> None:
    tensors = {"d2t_W": drafter.d2t_W}
    for name, parameter in drafter.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for moment in MOMENTS:
            if parameter in optimizer.state:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    with atomic(path) as tmp:
        tensor_files.save(
            {n: t.cpu().contiguous() for n, t in tensors.items()}, tmp, {"place": json.dumps(place)}
        )


def load(path: Path, drafter: Drafter, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """Restore weights and moments in place; returns the place. Raises ContractError when the file is broken."""
    try:
        with safe_open(path, framework="pt") as f:
            place = json.loads(f.metadata()["place"])
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
        with torch.no_grad():
            drafter.d2t_W.copy_(tensors["d2t_W"])
            for name, parameter in drafter.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                if f"{MOMENTS[0]}.{name}" in tensors:
                    moments = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in MOMENTS}
                    applied = place["step"] - place.get("skips", {}).get("count", 0)
                    moments_step = torch.tensor(float(applied), device=parameter.device)
                    optimizer.state[parameter] = {"step": moments_step, **moments}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ContractError(
            f"{path}: not a readable training state ({e}). Train again with --from train."
        ) from e
    return place
