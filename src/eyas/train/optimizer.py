"""What moves a drafter's weights: AdamW; or Muon for the matrices between embedding and head, and AdamW for the rest.

A step can be skipped by a flag on the device, so that nothing waits for it.
"""

from typing import Any

import torch
from torch import Tensor

from eyas.drafter.network import Drafter
from eyas.target import Decision

BETAS, MOMENTUM, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.95, 0.01, 1.0


def choose(wanted: str, products: torch.dtype) -> Decision:
    """adamw or muon, and why."""
    if wanted != "auto":
        return Decision(wanted, "the recipe says so")
    if products == torch.bfloat16:
        return Decision("muon", "matrices learn faster by it, and its bfloat16 products are native here")
    return Decision("adamw", "Muon multiplies in bfloat16, which is slow here")


class Optimizer:
    """Muon's rate is matched to AdamW's (its update has AdamW's size), so that one rate serves both. Gradients are clipped for AdamW;
    Muon's update does not grow with them."""

    def __init__(self, drafter: Drafter, kind: str) -> None:
        head = drafter.lm_head.weight
        matrices = (
            [p for p in drafter.parameters() if p.dim() == 2 and p is not head] if kind == "muon" else []
        )
        rest = [p for p in drafter.parameters() if not any(p is m for m in matrices)]
        self.adamw = torch.optim.AdamW(rest, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        self.muons = [
            torch.optim.Muon(
                [m], weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
            )
            for m in matrices
        ]
        for each, m in zip(self.muons, matrices, strict=True):
            each.state[m]["momentum_buffer"] = torch.zeros_like(m)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Of each parameter: what its optimizer remembers."""
        return {p: s for each in (self.adamw, *self.muons) for p, s in each.state.items()}

    def restore(self, parameter: Tensor, moments: dict[str, Tensor], steps: int) -> None:
        """Remember this of a parameter that was moved so many times."""
        for each in self.muons:
            if parameter in each.state:
                each.state[parameter]["momentum_buffer"].copy_(moments["momentum_buffer"])
                return
        moved = {n: t.to(parameter.device) for n, t in moments.items()}
        self.adamw.state[parameter] = {"step": torch.tensor(float(steps), device=parameter.device), **moved}

    def step(self, rate: float, norm: Tensor, skipped: Tensor) -> None:
        """One step by the parameters' gradients, whose total norm is given; nothing changes where skipped is 1."""
        for each in (self.adamw, *self.muons):
            for group in each.param_groups:
                group["lr"] = rate
        # the fused step divides by the one and does nothing where the other is 1 (torch/optim/adamw.py, for GradScaler): clipped without
        # a pass of its own, skipped without waiting for a GPU
        setattr(self.adamw, "grad_scale", (norm / CLIP).clamp_min(1))  # noqa: B010
        setattr(self.adamw, "found_inf", skipped)  # noqa: B010
        self.adamw.step()
        for each in self.muons:
            ((parameter, held),) = each.state.items()
            kept = [(t, t.detach().clone()) for t in (parameter, held["momentum_buffer"])]
            each.step()
            for now, before in kept:
                with torch.no_grad():
                    now.copy_(torch.where(skipped > 0, before, now))
