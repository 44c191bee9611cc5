"""The EAGLE-3 drafter: one Llama decoder layer over [embedding; hidden], and its unrolling over draft steps.

    g_t (L aux states) ── norms ── fc ── h                token x_{t+1} ── embedding (the target's) ── e
                                         └──── residual ────┐
    [input_layernorm(e) ; hidden_norm(h)] ── attention ── + ── post_attention_layernorm ── SwiGLU ── + ── h'
    h' ── norm ── lm_head ── logits over the draft vocabulary;  h' (or norm(h')) is h of the next draft step

Source: arXiv 2503.01840; vLLM 0.32 model_executor/models/llama_eagle3.py for names and order.
T positions, D target width, L aux layers, W draft vocabulary, H heads, N key heads, E head width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.contract import Contract
from eyas.drafter.attention import Frequencies, Rotation, frequencies, rope, ttt_attention, visible
from eyas.drafter.batch import Batch
from eyas.drafter.linear import Linear

INIT_STD = 0.02


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Drafter(nn.Module):
    """Weights and the pieces of the forward pass. The embedding belongs to the target and is given by the caller."""

    d2t_W: Tensor

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        c = self.contract = contract
        d = c.hidden
        layers = len(c.aux_layers)
        self.fc = Linear(layers * d, d, bias=False)
        chunk_norms = layers if c.norms.fc == "chunks" else 0
        self.fc_norm = nn.ModuleList(RMSNorm(d, c.eps) for _ in range(chunk_norms))
        self.input_norm = RMSNorm(layers * d, c.eps) if c.norms.fc == "whole" else None
        self.input_layernorm = RMSNorm(d, c.eps)
        self.hidden_norm = RMSNorm(d, c.eps)
        self._attention(c)
        self.o_proj = Linear(c.heads * c.head_dim, d, bias=False)
        self.post_attention_layernorm = RMSNorm(d, c.eps)
        self.gate_proj = Linear(d, c.mlp, bias=False)
        self.up_proj = Linear(d, c.mlp, bias=False)
        self.down_proj = Linear(c.mlp, d, bias=False)
        self.norm = RMSNorm(d, c.eps)
        self.lm_head = Linear(d, c.draft_vocab, bias=False)
        self._frequencies: dict[torch.device, Frequencies] = {}
        self.register_buffer("d2t_W", torch.zeros(c.draft_vocab, dtype=torch.int64))

    def _attention(self, c: Contract) -> None:
        """Make what `query` and `key_value` need."""
        wide, e = 2 * c.hidden, c.head_dim
        self.q_proj = Linear(wide, c.heads * e, bias=False)
        self.k_proj = Linear(wide, c.kv_heads * e, bias=False)
        self.v_proj = Linear(wide, c.kv_heads * e, bias=False)
        self.q_norm = RMSNorm(e, c.eps) if c.norms.qk else None
        self.k_norm = RMSNorm(e, c.eps) if c.norms.qk else None

    @property
    def rotated_width(self) -> int:
        """Of a head: what rope sees."""
        return self.contract.head_dim

    @property
    def key_width(self) -> int:
        """Of a query's or key's head; a value's is contract.head_dim."""
        return self.contract.head_dim

    def reset(self, seed: int, kept_W: Tensor, head_WD: Tensor, norm_D: Tensor) -> None:
        """Start from nothing: normal weights; head and norm from the target, rows of the kept ids (ascending)."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
            self.lm_head.weight.copy_(head_WD.float())
            self.norm.weight.copy_(norm_D)
            self.d2t_W.copy_(kept_W - torch.arange(len(kept_W)))

    def fc_norms(self) -> list[RMSNorm]:
        """The norms before fc, in the order of its input: none, one, or one of each aux state."""
        return [n for n in (self.input_norm, *self.fc_norm) if isinstance(n, RMSNorm)]

    @property
    def kept_W(self) -> Tensor:
        """Target id of each draft id (d2t holds offsets)."""
        return torch.arange(len(self.d2t_W), device=self.d2t_W.device) + self.d2t_W

    def fuse(self, aux_TLD: Tensor) -> Tensor:
        """Aux states to the drafter's width, [T, D]."""
        if self.fc_norm:
            aux_TLD = torch.stack([norm(aux_TLD[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        flat = aux_TLD.flatten(1)
        if self.input_norm is not None:
            flat = self.input_norm(flat)
        return self.fc(flat)

    def mix(self, embedded_TD: Tensor, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The attention input [T, 2D] and the residual [T, D]."""
        normed = self.hidden_norm(h_TD)
        x = torch.cat([self.input_layernorm(embedded_TD), normed], -1)
        return x, normed if self.contract.norms.before_residual else h_TD

    def rotation(self, pos_T: Tensor) -> Rotation:
        c = self.contract
        if pos_T.device not in self._frequencies:
            self._frequencies[pos_T.device] = frequencies(self.rotated_width, c.rope, c.context, pos_T.device)
        return self._frequencies[pos_T.device].at(pos_T)

    def forget_rope(self) -> None:
        """To be called where the contract's rope was changed."""
        self._frequencies.clear()

    def query(self, x_T2D: Tensor, turn: Rotation) -> Tensor:
        query = self.q_proj(x_T2D).unflatten(-1, (-1, self.contract.head_dim))
        return rope(self.q_norm(query) if self.q_norm else query, turn)

    def key_value(self, x_T2D: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        shape = (self.contract.kv_heads, self.contract.head_dim)
        key = self.k_proj(x_T2D).unflatten(-1, shape)
        key = rope(self.k_norm(key) if self.k_norm else key, turn)
        return key, self.v_proj(x_T2D).unflatten(-1, shape)

    def finish(self, attended_TX: Tensor, residual_TD: Tensor) -> Tensor:
        """Output projection, residual, MLP: h of this step, before any norm."""
        h = residual_TD + self.o_proj(attended_TX)
        x = self.post_attention_layernorm(h)
        return h + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def logits(self, h_TD: Tensor) -> Tensor:
        return self.lm_head(self.norm(h_TD))

    def fed_back(self, h_TD: Tensor) -> Tensor:
        """What the next draft step gets as h."""
        return self.norm(h_TD) if self.contract.norms.output else h_TD


class Step(NamedTuple):
    """Draft step k of every position that still lives."""

    k: int
    live: Tensor  # [Mk] indices m of the batch
    h: Tensor  # [Mk, D]


def unroll(
    drafter: Drafter,
    embedding_VD: Tensor,
    batch: Batch,
    steps: int,
    choose: Callable[[Step], Tensor] | None = None,
) -> Iterator[Step]:
    """Run draft steps 0..steps-1 for every live position at once, and yield each.

    Tokens are teacher-forced; or, with `choose`, drafted: it returns the target ids [Mk] that step k proposes, which
    step k+1 reads. Ends early when nothing lives. Raises ValueError when the batch was packed for fewer steps.
    """
    if steps > batch.steps:
        raise ValueError(f"{steps} draft steps of a batch that was packed for {batch.steps}")
    dtype = drafter.fc.weight.dtype
    embed = lambda ids: F.embedding(ids, embedding_VD).to(dtype)  # noqa: E731
    x, residual = drafter.mix(embed(batch.key_token_K), drafter.fuse(batch.key_aux_KLD.to(dtype)))
    key_K, value_K = drafter.key_value(x, drafter.rotation(batch.key_pos_K))
    count = len(batch.first_B)
    key = _spread(key_K, batch.key_grid_K, count, batch.keys)
    value = _spread(value_K, batch.key_grid_K, count, batch.keys)
    mask = visible(batch.keys, batch.queries, batch.first_B)
    attend = (
        partial(checkpoint, ttt_attention, use_reentrant=False) if torch.is_grad_enabled() else ttt_attention
    )
    at = batch.query_key_M[: batch.pairs]
    pos_M = batch.key_pos_K[at]
    x, residual = _take(x, at), _take(residual, at)
    turn = drafter.rotation(pos_M)
    own: list[tuple[Tensor, Tensor]] = []
    chosen: Tensor | None = None
    h = x
    for k, (live, stays) in enumerate(zip(batch.live[:steps], batch.stays[:steps], strict=True)):
        place = batch.grid_M[live]
        if k:
            h = drafter.fed_back(_take(h, stays))
            token = batch.token_M[live + k] if chosen is None else chosen[stays]
            x, residual = drafter.mix(embed(token), h)
            turn = drafter.rotation(pos_M[live] + k)
            own_k, own_v = drafter.key_value(x, turn)
            own.append(
                (_spread(own_k, place, count, batch.queries), _spread(own_v, place, count, batch.queries))
            )
        query = _spread(drafter.query(x, turn), place, count, batch.queries)
        attended = attend(query, key, value, list(own), mask)
        h = drafter.finish(_take(attended.flatten(0, 1), place), residual)
        step = Step(k, live, h)
        yield step
        chosen = choose(step) if choose else None


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[index] whose gradient is added row by row (that of x[index] sorts the index first, which costs a GPU far more)."""
    return x.index_select(0, index)


def _spread(flat: Tensor, place: Tensor, rows: int, columns: int) -> Tensor:
    """Values to their places of a padded grid [rows, columns, …]; zeros elsewhere."""
    out = flat.new_zeros(rows * columns, *flat.shape[1:])
    return out.index_copy(0, place, flat).view(rows, columns, *flat.shape[1:])
