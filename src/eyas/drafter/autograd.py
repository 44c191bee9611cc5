"""Gradients of training-time test through autograd: what trains a drafter whose layer drafter/gradients.py does not write out.

The function is drafter/loss.py's. Each draft step's logits live only until their own gradient is known; what the steps keep for the way
back is the layer's, with attention computed again.
"""

import torch
from torch import Tensor

from eyas.drafter.batch import Batch
from eyas.drafter.loss import LOSSES, Loss, Teacher, teacher_logits
from eyas.drafter.network import Drafter, unroll


class Autograd:
    """Used as drafter.gradients.Gradients is."""

    def __init__(
        self, drafter: Drafter, teacher: Teacher, dtype: torch.dtype, steps: int, decay: float, kind: str = "kl"
    ) -> None:  # fmt: skip
        self.drafter, self.teacher, self.dtype = drafter, teacher, dtype
        self.steps, self.decay, self.kind = steps, decay, kind
        self.device = drafter.fc.weight.device
        self.refresh()

    def refresh(self) -> None:
        """To be called after the parameters were changed."""
        self.none()

    def none(self) -> None:
        """Of a step without a batch: all gradients are 0."""
        for p in self.drafter.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            else:
                p.grad.zero_()

    def finish(self) -> None:
        """They are complete after every batch."""

    def add(self, batch: Batch, pairs: int) -> Loss:
        """Add the gradients of one batch of a step of `pairs` supervised tokens; the loss's total is divided by them already.

        Raises ValueError when the batch was packed for fewer steps.
        """
        products = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with torch.enable_grad(), products:
            return self._add(batch, pairs)

    def _add(self, batch: Batch, pairs: int) -> Loss:
        t = self.teacher
        draft_id_M = t.draft_id_V[batch.top1_M]
        inside_M = (draft_id_M >= 0).float()
        with torch.no_grad():
            logp_MW = teacher_logits(t, batch.last_MD).float().log_softmax(-1)
        total = torch.zeros((), device=self.device)
        hits, states, gradients = [], list[Tensor](), list[Tensor]()
        for step in unroll(self.drafter, t.embedding_VD, batch, self.steps):
            at = step.live + step.k
            h = step.h.detach().requires_grad_()
            logits = self.drafter.logits(h)
            loss = (LOSSES[self.kind](logp_MW[at], logits) * inside_M[at]).sum() * (
                self.decay**step.k / pairs
            )
            loss.backward()
            assert h.grad is not None
            states.append(step.h)
            gradients.append(h.grad)
            total += loss.detach()
            hits.append((logits.detach().argmax(-1) == draft_id_M[at]).sum())
        torch.autograd.backward(states, gradients)
        return Loss(total, torch.stack(hits), list(batch.pairs_S[: len(hits)]))
