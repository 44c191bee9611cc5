"""The training loss: divergence from the target's distribution over the draft vocabulary, float32.

A position whose target argmax is outside the draft vocabulary gives no loss (a renormalised distribution without its
top says little), but counts as a miss wherever acceptance is estimated.
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
    hits: list[int]  # per draft step: teacher-forced argmax equals the target's argmax
    pairs: list[int]  # per draft step: live pairs, those outside the vocabulary included


def teacher_logits(teacher: Teacher, last_MD: Tensor) -> Tensor:
    """Head over the final norm of the last hidden states, kept rows only."""
    normed = F.rms_norm(last_MD.float(), (last_MD.shape[-1],), teacher.norm_D, teacher.eps)
    return normed.to(teacher.head_WD.dtype) @ teacher.head_WD.T


def divergence(teacher_PW: Tensor, draft_PW: Tensor) -> Tensor:
    """Sum over pairs of KL(target || drafter), both renormalised over the draft vocabulary, in float32."""
    target = teacher_PW.float().log_softmax(-1)
    return F.kl_div(draft_PW.float().log_softmax(-1), target, reduction="sum", log_target=True)


def ttt_loss(drafter: Drafter, teacher: Teacher, batch: Batch, steps: int, decay: float) -> Loss:
    """Training-time test over `steps` draft steps (arXiv 2503.01840 section 3)."""
    draft_id_M = teacher.draft_id_V[batch.top1_M]
    inside_M = draft_id_M >= 0
    with torch.no_grad():
        place = inside_M.cumsum(0) - 1  # m -> its row among the positions whose teacher is needed
        teacher_PW = teacher_logits(teacher, batch.last_MD[inside_M])
    total = batch.last_MD.new_zeros((), dtype=torch.float32)
    hits, pairs = [], []
    for step in unroll(drafter, teacher.embedding_VD, batch, steps):
        at = step.live + step.k
        inside = inside_M[at]
        logits = drafter.logits(step.h[inside])
        total = total + decay**step.k * divergence(teacher_PW[place[at[inside]]], logits)
        hits.append(int((logits.detach().argmax(-1) == draft_id_M[at[inside]]).sum()))
        pairs.append(len(step.live))
    return Loss(total, hits, pairs)
