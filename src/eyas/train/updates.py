"""One optimizer step: gradients of its batches, the move of the float32 weights, and the products' copies made anew.

A step whose loss or gradient is not finite, or whose loss is far above the usual one, changes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.drafter.autograd import Autograd
from eyas.drafter.batch import Batch
from eyas.drafter.gradients import Gradients
from eyas.drafter.loss import Teacher
from eyas.drafter.network import Drafter
from eyas.train import group
from eyas.train.optimizer import Optimizer

SPIKE = 4  # times the usual loss
STEADY = 50  # steps before there is a usual loss
MEMORY = 0.98  # of the usual loss, a decayed mean


class TTT(NamedTuple):
    """How training-time test weighs its draft steps."""

    steps: int
    decay: float
    kind: str = "kl"


class Update(NamedTuple):
    """Figures of one optimizer step, on the device."""

    loss: Tensor  # a supervised token
    norm: Tensor  # of the gradient, before it was clipped
    hits_S: Tensor  # per draft step: how often the teacher-forced argmax is the target's
    pairs_S: list[int]
    usual: Tensor  # the loss before this step
    skipped: Tensor  # 1 when no weight was changed
    stop: Tensor  # how many processes want to stop


class Updates:
    """A drafter, its optimizer, and how both move."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, dtype: torch.dtype, ttt: TTT, optimizer: str = "adamw"
    ) -> None:
        self.drafter, self.ttt, self.group = drafter, ttt, group.current()
        way = Autograd if drafter.contract.latent else Gradients
        self.gradients = way(drafter, teacher, dtype, ttt.steps, ttt.decay, ttt.kind)
        self.optimizer = Optimizer(drafter, optimizer)
        device = drafter.fc.weight.device
        self.usual, self.counted = torch.zeros((), device=device), torch.zeros((), device=device)

    def apply(
        self, batches: Sequence[Batch], rate: float, pairs: int | None = None, stop: bool = False
    ) -> Update:
        """One step over all these batches, and those of the other processes: `pairs` is then what all have. Nothing here waits for a
        GPU."""
        pairs = pairs or sum(b.pairs for b in batches)
        device = self.drafter.fc.weight.device
        total, hits_S = torch.zeros((), device=device), torch.zeros(self.ttt.steps, device=device)
        seen = [0] * self.ttt.steps
        for batch in batches:
            loss = self.gradients.add(batch, pairs)
            total += loss.total
            hits_S[: len(loss.pairs)] += loss.hits_K
            for k, n in enumerate(loss.pairs):
                seen[k] += n
        if not batches:
            self.gradients.none()
        self.gradients.finish()
        wants = torch.full_like(total, stop)
        self.group.sum(
            [*(p.grad for p in self.drafter.parameters() if p.grad is not None), total, hits_S, wants]
        )
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.drafter.parameters() if p.grad is not None]
        )
        usual, skipped = self._judge(total, norm)
        self.optimizer.step(rate, norm, skipped)
        self.gradients.refresh()
        return Update(total, norm, hits_S, seen, usual, skipped, wants)

    def _judge(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The usual loss until now, and 1 where the step is to be skipped; then the usual loss moves on."""
        usual = self.usual
        good = loss.isfinite() & norm.isfinite() & ((self.counted < STEADY) | (loss <= SPIKE * usual))
        moved = torch.where(self.counted == 0, loss, MEMORY * usual + (1 - MEMORY) * loss)
        self.usual = torch.where(good, moved, usual)
        self.counted = self.counted + good
        return usual, 1 - good.float()
