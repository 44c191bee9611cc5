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

from eyas.contract import SCALINGS, Rope
from eyas.errors import ContractError


class Rotation(NamedTuple):
    """Cosines and sines of each position's angles, float32: computed once, used by queries and keys."""

    cos_T1E: Tensor  # E: half of what is rotated of a head
    sin_T1E: Tensor


class Frequencies(NamedTuple):
    """Turns of each pair of a head's dimensions with every position, float32, and the factor on cosines and sines."""

    turns_E: Tensor
    factor: float

    def at(self, pos_T: Tensor) -> Rotation:
        angle = pos_T.float()[:, None, None] * self.turns_E
        if self.factor == 1:
            return Rotation(angle.cos(), angle.sin())
        return Rotation(angle.cos() * self.factor, angle.sin() * self.factor)


def frequencies(width: int, said: Rope, context: int, device: torch.device | str = "cpu") -> Frequencies:
    """Rotary embedding of heads of `width`; scaled as transformers does it.

    Raises ContractError for a scaling that is none of SCALINGS, or lacks a parameter.
    """
    rotated = int(width * said.partial) // 2
    if not said.scaling:
        steps = torch.arange(rotated, device=device, dtype=torch.float32) / rotated
        return Frequencies(said.theta**-steps, 1.0)
    scaling = said.scaling_dict()
    if scaling["rope_type"] not in SCALINGS:
        raise ContractError(
            f"rope is scaled by {scaling['rope_type']}, which eyas does not compute; known: {', '.join(SCALINGS)}"
        )
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, "rope_theta": said.theta}
    try:
        config = LlamaConfig(
            hidden_size=2 * rotated, num_attention_heads=1, head_dim=2 * rotated, max_position_embeddings=context,
            rope_parameters=parameters,
        )  # fmt: skip
        turns, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device(device))
    except (KeyError, TypeError, ValueError) as e:
        raise ContractError(f"rope scaling {scaling} cannot be computed: {e}") from e
    return Frequencies(turns.float(), float(factor))


def rope(x_THE: Tensor, turn: Rotation) -> Tensor:
    """Rotary embedding, halves of what is rotated (Llama convention), in float32."""
    cos, sin = turn
    half = cos.shape[-1]
    x = x_THE.float()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x_THE.dtype)


def rope_pairs(x_THE: Tensor, turn: Rotation) -> Tensor:
    """Rotary embedding of neighbouring dimensions (DeepSeek's convention), in float32. What was rotated comes out as halves: the order
    is the same in queries and keys, and products of both do not depend on it."""
    cos, sin = turn
    a, b = x_THE.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_THE.dtype)


def visible(key_grid_J: int, queries: int, first_B: Tensor) -> Tensor:
    """[B, 1, 1, Q, J]: key j is at or before query q of its row, which stands at key first + q."""
    q = torch.arange(queries, device=first_B.device)
    j = torch.arange(key_grid_J, device=first_B.device)
    return (j <= (first_B[:, None] + q)[..., None])[:, None, None]


def ttt_attention(
    q_BQHE: Tensor, k_BJNE: Tensor, v_BJNE: Tensor, own: list[tuple[Tensor, Tensor]], visible_mask: Tensor
) -> Tensor:
    """Softmax over the visible step-0 keys and the own keys together; returns [B, Q, H*E], E the width of a value.

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
    return out.permute(0, 3, 1, 2, 4).reshape(b, q, -1)
