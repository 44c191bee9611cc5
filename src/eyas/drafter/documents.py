"""Attention of live positions over the step-0 keys of their own rows, causal, forward and backward: PyTorch's FlashAttention with
variable lengths on a GPU, padded grids of products on a CPU.

The last key of a row is its last live position, so query i of a row with Q queries and J keys sees keys 0 … J - Q + i.

H heads in groups over N key heads, E head width, m live positions, K keys (N of keys, then N of values).
"""

import torch
from torch import Tensor

from eyas.drafter.attention import visible
from eyas.drafter.batch import Batch


def attend(q_mHE: Tensor, kv_KNE: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
    """The attention's result [m, H, E] and its log-sum-exp [H, m], float32."""
    key, value = kv_KNE[: len(batch.key_grid_K)].chunk(2, 1)
    if q_mHE.is_cuda and q_mHE.dtype != torch.float32:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_mHE, key, value, batch.query_bounds_B, batch.key_bounds_B, batch.queries, batch.keys, 0.0, True, False, scale=scale
        )  # fmt: skip
        return out, lse
    grid = _Grid(q_mHE, key, value, batch, scale)
    lse = grid.scores.logsumexp(-1)
    out = (grid.scores - lse[..., None]).exp().to(q_mHE.dtype) @ grid.value
    return grid.back(out), grid.back(lse[..., None])[..., 0].T.contiguous()


def attend_backward(
    dout_mHE: Tensor, q_mHE: Tensor, kv_KNE: Tensor, out_mHE: Tensor, lse_Hm: Tensor, batch: Batch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [m, H, E], keys and values [K, N, E]. With `out` and `lse` of an attention that saw more than these keys, they
    are these keys' part of its gradients: shares are exp(score - lse)."""
    key, value = kv_KNE[: len(batch.key_grid_K)].chunk(2, 1)
    if q_mHE.is_cuda and q_mHE.dtype != torch.float32:
        none = torch.zeros(2, dtype=torch.uint64, device=q_mHE.device)  # random state, of a dropout that is not used
        return torch.ops.aten._flash_attention_backward(
            dout_mHE, q_mHE, key, value, out_mHE, lse_Hm, batch.query_bounds_B, batch.key_bounds_B, batch.queries, batch.keys,
            0.0, True, none, none[:0], scale=scale,
        )  # fmt: skip
    grid = _Grid(q_mHE, key, value, batch, scale)
    dout = grid.of_queries(dout_mHE)
    lse = grid.of_queries(lse_Hm.T[..., None])
    delta = grid.of_queries((dout_mHE.float() * out_mHE.float()).sum(-1, keepdim=True))
    share = (grid.scores - lse).exp()
    dscore = (share * ((dout @ grid.value.transpose(-1, -2)).float() - delta)).to(dout.dtype)
    dq = dscore @ grid.key * scale
    dkey = (dscore.transpose(-1, -2) @ grid.query).sum(2)  # the query is scaled already
    dvalue = (share.to(dout.dtype).transpose(-1, -2) @ dout).sum(2)
    return grid.back(dq), grid.keys_back(dkey), grid.keys_back(dvalue)


class _Grid:
    """Queries, keys and values of rows in padded grids [B, N, G, Q or J, E], and their scores, -inf where not visible."""

    def __init__(self, q_mHE: Tensor, key_KNE: Tensor, value_KNE: Tensor, batch: Batch, scale: float) -> None:
        self.batch, self.heads = batch, key_KNE.shape[1]
        self.query = self.of_queries(q_mHE) * scale
        self.key, self.value = self._of_keys(key_KNE), self._of_keys(value_KNE)
        seen = visible(batch.keys, batch.queries, batch.first_B)
        self.scores = (self.query @ self.key.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))

    def of_queries(self, x_mHX: Tensor) -> Tensor:
        b, q = len(self.batch.first_B), self.batch.queries
        out = x_mHX.new_zeros(b * q, *x_mHX.shape[1:]).index_copy(0, self.batch.grid_M, x_mHX)
        return out.view(b, q, self.heads, -1, x_mHX.shape[-1]).permute(0, 2, 3, 1, 4)

    def _of_keys(self, x_KNE: Tensor) -> Tensor:
        b, j = len(self.batch.first_B), self.batch.keys
        out = x_KNE.new_zeros(b * j, *x_KNE.shape[1:]).index_copy(0, self.batch.key_grid_K, x_KNE)
        return out.view(b, j, self.heads, -1).permute(0, 2, 1, 3)[:, :, None]

    def back(self, x_BNGQX: Tensor) -> Tensor:
        b, n, g, q, x = x_BNGQX.shape
        return x_BNGQX.permute(0, 3, 1, 2, 4).reshape(b * q, n * g, x).index_select(0, self.batch.grid_M)

    def keys_back(self, x_BNJE: Tensor) -> Tensor:
        b, n, j, e = x_BNJE.shape
        return x_BNJE.permute(0, 2, 1, 3).reshape(b * j, n, e).index_select(0, self.batch.key_grid_K)
