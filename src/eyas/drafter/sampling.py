"""From logits to tokens: temperature, top-p, and a sampler whose draws belong to a row, not to a batch."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256


def probabilities(logits_BV: Tensor, temperature: float | Tensor, top_p: float = 1.0) -> Tensor:
    """Float32 distribution at temperature > 0 (one, or one a row [B, 1]), cut to the smallest set that holds top_p."""
    probs = (logits_BV.float() / temperature).softmax(-1)
    if top_p >= 1.0:
        return probs
    ordered, index = probs.sort(-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return probs / probs.sum(-1, keepdim=True)


def pick(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at uniform_B in [0, 1), in float64; never a token of probability 0.

    Blocks are summed first and only the block that holds the point is walked through: a cumulative sum of a whole
    vocabulary is slow on a GPU.
    """
    rows, vocab = probs_BV.shape
    blocks = F.pad(probs_BV, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    before = sums.cumsum(-1)
    block, rest = _find(before, uniform_B.double() * before[:, -1])
    rest = rest - torch.where(block > 0, before.gather(-1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    inside = blocks[torch.arange(rows, device=block.device), block].double().cumsum(-1)
    return block * BLOCK + _find(inside, rest)[0]


def _find(cumulative_BN: Tensor, point_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative value exceeds the point, which is held below the total."""
    point = torch.minimum(point_B.clamp_min(0), cumulative_BN[:, -1] * (1 - 1e-12))
    return torch.searchsorted(cumulative_BN, point[:, None], right=True)[:, 0], point


def row_uniforms(row_id: str, count: int) -> np.ndarray:
    """The row's own random numbers: the same whatever else is in its batch, so that a resumed run draws the same."""
    return np.random.default_rng(int(row_id, 16)).random(count)
