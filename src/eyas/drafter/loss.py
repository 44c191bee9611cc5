"""The training loss: how far the drafter is from the target's distribution over the draft vocabulary, float32.

A position whose target argmax is outside the draft vocabulary gives no loss (a renormalised distribution without its
top says little), but counts as a miss wherever acceptance is estimated.

This is the specification, through autograd: short, and slow. Training runs drafter/gradients.py, which tests compare with it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.batch import Batch
from eyas.drafter.network import Drafter, unroll


class Teacher(NamedTuple):
    """What the loss needs of the target: the head rows of the kept ids [W, D], the final norm [D], target id -> draft id
    or -1 [V], and the embedding [V, D]."""

    head_WD: Tensor
    norm_D: Tensor
    eps: float
    draft_id_V: Tensor
    embedding_VD: Tensor


class Loss(NamedTuple):
    total: Tensor  # sum over steps of decay^k times the sum over pairs, to be divided by the step's pairs
    hits_K: Tensor  # per draft step: how often the teacher-forced argmax is the target's argmax
    pairs: list[int]  # per draft step: live pairs, those outside the vocabulary included


def teacher_logits(teacher: Teacher, last_MD: Tensor) -> Tensor:
    """Head over the final norm of the last hidden states, kept rows only."""
    normed = F.rms_norm(last_MD.float(), (last_MD.shape[-1],), teacher.norm_D, teacher.eps)
    return normed.to(teacher.head_WD.dtype) @ teacher.head_WD.T


def divergence(target_logp_PW: Tensor, draft_PW: Tensor) -> Tensor:
    """[P]: KL(target || drafter) of each pair, both normalised over the draft vocabulary, in float32."""
    draft = draft_PW.float().log_softmax(-1)
    return F.kl_div(draft, target_logp_PW, reduction="none", log_target=True).sum(-1)


def unlikeness(target_logp_PW: Tensor, draft_PW: Tensor) -> Tensor:
    """[P]: -log of the acceptance sum_v min(p, q) that sampled drafts would have (LK loss, arXiv 2602.23881)."""
    draft = draft_PW.float().log_softmax(-1)
    return -torch.minimum(target_logp_PW, draft).exp().sum(-1).clamp_min(1e-9).log()


LOSSES = {"kl": divergence, "lk": unlikeness}


def ttt_loss(
    drafter: Drafter, teacher: Teacher, batch: Batch, steps: int, decay: float, kind: str = "kl"
) -> Loss:
    """Training-time test over `steps` draft steps (arXiv 2503.01840 section 3)."""
    draft_id_M = teacher.draft_id_V[batch.top1_M]
    inside_M = (draft_id_M >= 0).float()
    with torch.no_grad():
        logp_MW = teacher_logits(teacher, batch.last_MD).float().log_softmax(-1)
    total = batch.last_MD.new_zeros((), dtype=torch.float32)
    hits, pairs = [], []
    for step in unroll(drafter, teacher.embedding_VD, batch, steps):
        at = step.live + step.k
        logits = drafter.logits(step.h)
        total = total + decay**step.k * (LOSSES[kind](logp_MW[at], logits) * inside_M[at]).sum()
        hits.append((logits.detach().argmax(-1) == draft_id_M[at]).sum())
        pairs.append(len(step.live))
    return Loss(total, torch.stack(hits), pairs)
