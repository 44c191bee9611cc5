"""Attention of live positions over the step-0 keys of their own rows, causal, forward and backward: PyTorch's FlashAttention, with
variable lengths on a GPU, in padded grids on a CPU. A GPU without bfloat16 has neither: products and a softmax.

The last key of a row is its last live position, so query i of a row with Q queries and J keys sees keys 0 … J - Q + i.

H heads in groups over N key heads, E head width, M live positions, K keys (N of keys, then N of values), B rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.drafter.attention import visible
from eyas.drafter.batch import Batch

aten = torch.ops.aten


def attend(q_MHE: Tensor, kv_KNE: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    """The attention's result [M, H, E] and its log-sum-exp [H, M], float32."""
    key, value = kv_KNE.chunk(2, 1)
    if _varying(q_MHE):
        out, lse, *_ = aten._flash_attention_forward(
            q_MHE, key, value, batch.query_bounds_B, batch.key_bounds_B, batch.queries, batch.keys, 0.0, True, False, scale=scale
        )  # fmt: skip
        return out, lse
    grid = _Grid(q_MHE, key, value, batch)
    if q_MHE.is_cuda:
        scores = grid.scores(scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ grid.value
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *grid, 0.0, False, attn_mask=grid.mask, scale=scale
        )
    return grid.back(out), grid.back(lse[..., None])[..., 0].T.contiguous()


def attend_backward(
    dout_MHE: Tensor, q_MHE: Tensor, kv_KNE: Tensor, out_MHE: Tensor, lse_HM: Tensor, batch: Batch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [M, H, E], keys and values [K, N, E]. With `out` and `lse` of an attention that saw more than these keys, they
    are these keys' part of its gradients: shares are exp(score - lse)."""
    key, value = kv_KNE.chunk(2, 1)
    if _varying(q_MHE):
        none = torch.zeros(
            2, dtype=torch.uint64, device=q_MHE.device
        )  # random state, of a dropout that is not used
        return aten._flash_attention_backward(
            dout_MHE, q_MHE, key, value, out_MHE, lse_HM, batch.query_bounds_B, batch.key_bounds_B, batch.queries, batch.keys,
            0.0, True, none, none[:0], scale=scale,
        )  # fmt: skip
    grid = _Grid(
        q_MHE.float(), key.float(), value.float(), batch
    )  # on a CPU faster than bfloat16, for rows of a chat
    dout, out, lse = (grid.of_queries(x.float()) for x in (dout_MHE, out_MHE, lse_HM.T[..., None]))
    if q_MHE.is_cuda:
        share = (grid.scores(scale) - lse).exp()
        dscore = share * (dout @ grid.value.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
        dq, dkey, dvalue = (
            dscore @ grid.key,
            dscore.transpose(-1, -2) @ grid.query,
            share.transpose(-1, -2) @ dout,
        )
    else:
        dq, dkey, dvalue = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *grid, out, lse[..., 0].contiguous(), 0.0, False, attn_mask=grid.mask, scale=scale
        )
    return grid.back(dq), grid.keys_back(dkey), grid.keys_back(dvalue)


def _varying(q_MHE: Tensor) -> bool:
    return q_MHE.is_cuda and q_MHE.dtype != torch.float32


class _Grid:
    """Queries, keys and values of rows in padded grids [B, H, Q or J, E]; keys and values once for every head of their group."""

    def __init__(self, q_MHE: Tensor, key_KNE: Tensor, value_KNE: Tensor, batch: Batch) -> None:
        self.batch, self.group = batch, q_MHE.shape[1] // key_KNE.shape[1]
        self.query, self.key, self.value = (
            self.of_queries(q_MHE),
            self._of_keys(key_KNE),
            self._of_keys(value_KNE),
        )
        seen_BQJ = visible(batch.keys, batch.queries, batch.first_B)[:, 0]
        self.mask = torch.zeros(seen_BQJ.shape, dtype=q_MHE.dtype, device=q_MHE.device)
        self.mask.masked_fill_(~seen_BQJ, float("-inf"))

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.query, self.key, self.value))

    def scores(self, scale: float) -> Tensor:
        return self.query @ self.key.transpose(-1, -2) * scale + self.mask

    def of_queries(self, x_MHX: Tensor) -> Tensor:
        b, q = len(self.batch.first_B), self.batch.queries
        out = x_MHX.new_zeros(b * q, *x_MHX.shape[1:]).index_copy_(0, self.batch.grid_M, x_MHX)
        return out.unflatten(0, (b, q)).transpose(1, 2)

    def _of_keys(self, x_KNE: Tensor) -> Tensor:
        b, j = len(self.batch.first_B), self.batch.keys
        out = x_KNE.new_zeros(b * j, *x_KNE.shape[1:]).index_copy_(0, self.batch.key_grid_K, x_KNE)
        return out.unflatten(0, (b, j)).repeat_interleave(self.group, 2).transpose(1, 2)

    def back(self, x_BHQX: Tensor) -> Tensor:
        return x_BHQX.transpose(1, 2).flatten(0, 1).index_select(0, self.batch.grid_M)

    def keys_back(self, x_BHJE: Tensor) -> Tensor:
        each = x_BHJE.transpose(1, 2).flatten(0, 1).index_select(0, self.batch.key_grid_K)
        return each.unflatten(1, (-1, self.group)).sum(2)
