"""A drafter with latent attention (MLA), whose cache is as small as its target's: DeepSeek's and Kimi's.

    x ── q_a ── norm ── q_b ── [nope | rope] of each head
    x ── kv_a ─┬─ norm ── kv_b ── [nope | value] of each head
               └─ rope, one for all heads

Everything else is the Llama drafter's. Source: arXiv 2405.04434; vLLM 0.32 model_executor/models/deepseek_eagle3.py for names and
order, deepseek_v2.py for the scale of the scores.
"""

import math

import torch
from torch import Tensor

from eyas.contract import Contract, Latent
from eyas.drafter.attention import Rotation, rope_pairs
from eyas.drafter.linear import Linear
from eyas.drafter.network import Drafter, RMSNorm


class LatentDrafter(Drafter):
    def _attention(self, c: Contract) -> None:
        a, wide = self.latent, 2 * c.hidden
        self.q_a_proj = Linear(wide, a.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(a.q_rank, c.eps)
        self.q_b_proj = Linear(a.q_rank, c.heads * (a.nope + a.rope), bias=False)
        self.kv_a_proj_with_mqa = Linear(wide, a.kv_rank + a.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(a.kv_rank, c.eps)
        self.kv_b_proj = Linear(a.kv_rank, c.heads * (a.nope + a.value), bias=False)

    @property
    def latent(self) -> Latent:
        assert self.contract.latent is not None
        return self.contract.latent

    @property
    def rotated_width(self) -> int:
        return self.latent.rope

    @property
    def key_width(self) -> int:
        return self.latent.nope + self.latent.rope

    def query(self, x_T2D: Tensor, turn: Rotation) -> Tensor:
        a = self.latent
        heads = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_T2D))).unflatten(
            -1, (self.contract.heads, -1)
        )
        plain, turned = heads.split([a.nope, a.rope], -1)
        return torch.cat([plain, rope_pairs(turned, turn)], -1) * sharpened(self.contract)

    def key_value(self, x_T2D: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        a = self.latent
        compressed, turned = self.kv_a_proj_with_mqa(x_T2D).split([a.kv_rank, a.rope], -1)
        heads = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (self.contract.heads, -1))
        plain, value = heads.split([a.nope, a.value], -1)
        shared = rope_pairs(turned[:, None], turn).expand(-1, self.contract.heads, -1)
        return torch.cat([plain, shared], -1), value


def sharpened(c: Contract) -> float:
    """What YaRN multiplies the scores by: the square of its factor for all dimensions (mscale_all_dim)."""
    scaling = dict(c.rope.scaling)
    factor = scaling.get("factor") or 1
    if scaling.get("kind") != "yarn" or factor <= 1:
        return 1.0
    return (0.1 * (scaling.get("mscale_all_dim") or 0) * math.log(factor) + 1) ** 2
