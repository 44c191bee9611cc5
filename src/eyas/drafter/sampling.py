"""From logits to tokens: temperature, top-p, and a sampler whose draws belong to a row, not to a batch."""

import numpy as np
import torch
from torch import Tensor


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
    """Inverse of the cumulative distribution at uniform_B in [0, 1); never a token of probability 0."""
    cumulative = probs_BV.double().cumsum(-1)
    point = uniform_B.double() * cumulative[:, -1]
    return (
        torch.searchsorted(cumulative, point[:, None], right=True)
        .squeeze(-1)
        .clamp_max(probs_BV.shape[-1] - 1)
    )


def row_uniforms(row_id: str, count: int) -> np.ndarray:
    """The row's own random numbers: the same whatever else is in its batch, so that a resumed run draws the same."""
    return np.random.default_rng(int(row_id, 16)).random(count)
