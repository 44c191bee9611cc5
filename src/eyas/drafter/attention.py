"""Attention of training-time test: at step k a query sees the step-0 keys up to its position, in its own row, and its
own key of each later step.

            step-0 keys of the row          own keys
    t=2     x x x . . .                     step 1, step 2, …
    t=3     x x x x . .                     step 1, step 2, …

H heads in G groups over N key heads (H = N * G), E head width; B rows, Q queries, J keys of a row, padded; S own keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of each position's angles, float32: computed once, used by queries and keys."""

    cos_T1E: Tensor  # E: half of the head width
    sin_T1E: Tensor


def rotation(pos_T: Tensor, width: int, theta: float) -> Rotation:
    """Angles of rotary embedding at positions, for heads of `width`."""
    half = width // 2
    freq = theta ** (-torch.arange(half, device=pos_T.device, dtype=torch.float32) / half)
    angle = pos_T.float()[:, None, None] * freq
    return Rotation(angle.cos(), angle.sin())


def rope(x_THE: Tensor, turn: Rotation) -> Tensor:
    """Rotary embedding, halves rotated (Llama convention), in float32."""
    a, b = x_THE.float().chunk(2, -1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_THE.dtype)


def visible(key_grid_J: int, queries: int, first_B: Tensor) -> Tensor:
    """[B, 1, 1, Q, J]: key j is at or before query q of its row, which stands at key first + q."""
    q = torch.arange(queries, device=first_B.device)
    j = torch.arange(key_grid_J, device=first_B.device)
    return (j <= (first_B[:, None] + q)[..., None])[:, None, None]


def ttt_attention(
    q_BQHE: Tensor, k_BJNE: Tensor, v_BJNE: Tensor, own: list[tuple[Tensor, Tensor]], visible_mask: Tensor
) -> Tensor:
    """Softmax over the visible step-0 keys and the own keys together; returns [B, Q, H*E].

    own: (key, value), each [B, Q, N, E], of steps 1..k for the same queries.
    """
    b, q, h, e = q_BQHE.shape
    n = k_BJNE.shape[2]
    query = q_BQHE.view(b, q, n, h // n, e).permute(0, 2, 3, 1, 4) * e**-0.5  # B N G Q E
    key = k_BJNE.permute(0, 2, 3, 1)[:, :, None]  # B N 1 E J
    scores = (query @ key).float().masked_fill(~visible_mask, float("-inf"))
    if own:
        own_key, own_value = (
            torch.stack(x, 3).permute(0, 2, 1, 3, 4)[:, :, None] for x in zip(*own, strict=True)
        )
        scores = torch.cat([scores, (query[..., None, :] * own_key).sum(-1).float()], -1)  # own: B N 1 Q S E
    weights = scores.softmax(-1).to(v_BJNE.dtype)
    j = k_BJNE.shape[1]
    out = weights[..., :j] @ v_BJNE.permute(0, 2, 1, 3)[:, :, None]
    if own:
        out = out + (weights[..., j:, None] * own_value).sum(-2)
    return out.permute(0, 3, 1, 2, 4).reshape(b, q, h * e)
