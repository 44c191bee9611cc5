"""Loss and gradients of training-time test, forward and backward written out: what training runs.

The same function as drafter/loss.py, which stays its specification (tests compare them), computed so that nothing is done twice and
little is done that no supervised pair needs:

    every key, step 0           fc, hidden_norm, keys and values; a prompt needs no more
    every live position, once   the embedding's half of q, k, v: W [e; n] = W_e e + W_n n, and e of pair (m, k) is that of m + k
                                the target's logits over the draft vocabulary
    (m, k), k = 0 … S-1         the hidden half of q, k, v; attention; MLP; head: loss and its gradient in one go, a chunk of
                                logits at a time
    (m, k), k = S-1 … 0         the way back; n, x and silu(gate) * up are computed again instead of kept

All M live positions are computed at each of the S steps: those past their row's end (S - 1 of a row at most) weigh 0 and reach
nothing that counts, and every shape stays the same. Gradients and sums are float32; products, and what is kept between them, have one
type, bfloat16 or float32.

K step-0 keys, M live positions, S draft steps, D width, I width of the MLP, H heads, N key heads, E head
width, L aux layers, W draft vocabulary, C rows of a chunk of logits.
"""

from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter import documents, graphs, pieces
from eyas.drafter.batch import Batch
from eyas.drafter.fused import Fused
from eyas.drafter.graphs import Graphs
from eyas.drafter.loss import Loss, Teacher
from eyas.drafter.network import Drafter, RMSNorm
from eyas.errors import SurroundingsError

CHUNK_BYTES = 2**29  # of logits at once
BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # at once, where the recipe leaves it open


def ops_of(device: torch.device) -> ModuleType:
    """Triton kernels on a GPU, their plain twins elsewhere."""
    if device.type != "cuda":
        return pieces
    try:
        from eyas.drafter import kernels
    except ModuleNotFoundError as e:
        raise SurroundingsError(
            "training on a GPU needs Triton, which PyTorch's CUDA builds bring along, and this Python has none. Install such a build, or "
            "Triton for this PyTorch."
        ) from e
    return kernels


def product_dtype(device: str, target_dtype: str) -> torch.dtype:
    """What training multiplies in: on a GPU bfloat16 where that is native, else float32; on a CPU what the target computes in."""
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return getattr(torch, target_dtype)


def row_multiple(device: str, products: torch.dtype) -> int:
    """What sizes of a batch are rounded up to: shapes that recur spare a GPU the search for kernels, and can be replayed as graphs."""
    return 256 if device == "cuda" and products != torch.float32 else 1


class Places(NamedTuple):
    """Where pairs read, at every draft step: index k + m of these."""

    ahead: Tensor  # [S+M] the live position m + k, at most the last
    key: Tensor  # [S+M] its key
    pos_M: Tensor  # rope position of m
    table_2PE: Tensor  # cosines and sines by position


class Keys(NamedTuple):
    """What every step-0 key is made of."""

    embedded_KD: Tensor  # embedding of the token, normed without scale
    live_MD: Tensor  # the same, of live positions
    h_KD: Tensor  # fc's result
    n_KD: Tensor  # hidden_norm of it
    kv_KNE: Tensor  # keys, then values
    half_q_MHE: Tensor  # the embedding's half of q, k and v
    half_kv_KNE: Tensor
    raw_KNE: Tensor | None  # keys before their norm


class Wanted(NamedTuple):
    """What the target says about every live position, and how much each pair counts."""

    target_MW: Tensor  # its distribution over the draft vocabulary
    certainty_M: Tensor  # sum of p log p
    draft_id_M: Tensor  # of the target's argmax, -1 outside the draft vocabulary
    weight_SM: Tensor  # decay^k / pairs; 0 of dead pairs and of those outside the vocabulary


class Kept(NamedTuple):
    """What the way back needs of one draft step."""

    before_MD: Tensor  # what hidden_norm read
    out_MHE: Tensor  # of attention
    lse_HM: Tensor
    middle_MD: Tensor  # after attention
    both_M2I: Tensor  # gate and up
    h_MD: Tensor
    dnormed_MD: Tensor  # the loss's gradient of norm(h)
    raw_q_MHE: Tensor | None  # queries before their norm
    raw_k_MNE: Tensor | None  # own keys before theirs


class Gradients:
    """Adds gradients of batches to a drafter's parameters.

    loss = g.add(batch, pairs)      for every batch of an optimizer step of so many supervised tokens
    g.finish()                      parameters' .grad are complete
    …optimizer step…
    g.refresh()
    """

    def __init__(
        self, drafter: Drafter, teacher: Teacher, dtype: torch.dtype, steps: int, decay: float, kind: str = "kl"
    ) -> None:  # fmt: skip
        self.drafter, self.teacher, self.steps, self.decay, self.kind = drafter, teacher, steps, decay, kind
        self.dtype, self.device = dtype, drafter.fc.weight.device
        self.ops = ops_of(self.device)
        self.w = Fused(drafter, dtype, self.ops)
        c = self.c = drafter.contract
        self.scale = c.head_dim**-0.5
        self.q_width = c.heads * c.head_dim
        self.table_2PE = torch.empty(2, 0, 0)
        self.weights = sum(p.numel() for p in drafter.parameters() if p.dim() == 2)
        self.replay = self.device.type == "cuda" and dtype != torch.float32  # small batches, as CUDA graphs
        of_heads = (drafter.q_norm, drafter.k_norm)
        self.norms = (
            drafter.hidden_norm,
            drafter.post_attention_layernorm,
            drafter.norm,
            *filter(None, of_heads),
        )
        self.sums = [self.ops.norm_sums(len(n.weight), self.device) for n in self.norms]
        self.nothing = torch.zeros(1, 1, c.head_dim, dtype=dtype, device=self.device)

    def refresh(self) -> None:
        """To be called after the parameters were changed."""
        self.w.refresh()
        for s in self.sums:
            s.zero_()

    def none(self) -> None:
        """Of a step without a batch: all gradients are 0."""
        for p in self.drafter.parameters():
            assert p.grad is not None
            p.grad.zero_()

    def finish(self) -> None:
        """Complete the parameters' gradients."""
        self.w.finish()
        for norm, s in zip(self.norms, self.sums, strict=True):
            assert norm.weight.grad is not None
            torch.sum(s, 0, out=norm.weight.grad)

    @torch.no_grad()
    def add(self, batch: Batch, pairs: int) -> Loss:
        """Add the gradients of one batch of a step of `pairs` supervised tokens; the loss's total is divided by them already.

        Raises ValueError when the batch was packed for fewer steps. Nothing here waits for a GPU.
        """
        if self.steps > batch.steps:
            raise ValueError(f"{self.steps} draft steps of a batch that was packed for {batch.steps}")
        steps = min(self.steps, len(batch.pairs_S))
        self._reach(batch.keys + steps)
        share = torch.full((), 1 / pairs, device=self.device)
        if self.replay and graphs.suits(len(batch.query_key_M), self.weights):
            loss, hits_S = self.graphs(self._of, batch, share, steps, self.w.begun)
            self.w.begun = True
        else:
            loss, hits_S = self._of(batch, share, steps)
        return Loss(loss, hits_S, list(batch.pairs_S[:steps]))

    def _of(self, batch: Batch, share: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Loss and hits; share: one supervised token's of the optimizer step."""
        places = self._places(batch, steps)
        way = _Way(self, batch, places, self._keys(batch, places), steps)
        figures_2SM = torch.empty(2, steps, len(places.pos_M), device=self.device)
        way.back(way.forward(self._wanted(batch, places, share, steps), figures_2SM))
        return figures_2SM[0].sum(), figures_2SM[1].sum(1)

    # ---- before the first step ----

    def _reach(self, positions: int) -> None:
        """Have so many positions' rotations."""
        if self.table_2PE.shape[1] < positions:
            cos, sin = self.drafter.rotation(torch.arange(1 << positions.bit_length(), device=self.device))
            self.table_2PE = torch.stack([cos, sin])[:, :, 0].contiguous()
            if self.replay:
                self.graphs = Graphs()  # the old ones read the old table

    def _places(self, batch: Batch, steps: int) -> Places:
        live = len(batch.query_key_M)
        ahead = torch.arange(live + steps, device=self.device).clamp_max(live - 1)
        return Places(ahead, batch.query_key_M[ahead], batch.key_pos_K[batch.query_key_M], self.table_2PE)

    def _keys(self, batch: Batch, places: Places) -> Keys:
        c, ops, w = self.c, self.ops, self.w
        table = self.teacher.embedding_VD
        embedded = ops.rms(F.embedding(batch.key_token_K, table).to(self.dtype), None, c.eps)
        live = embedded[batch.query_key_M]
        h = w.fc(self.unit(batch))
        n = ops.rms(h, self.drafter.hidden_norm.weight, c.eps)
        half_q = w.embedded_q(live).unflatten(1, (-1, c.head_dim))
        half_kv = w.embedded_kv(embedded).unflatten(1, (-1, c.head_dim))
        half = w.hidden_kv(n).unflatten(1, (-1, c.head_dim))
        kv, every = torch.empty_like(half), torch.arange(len(half), device=self.device)
        norm = self.drafter.k_norm
        raw = self.turned(norm, half, half_kv, every, batch.key_pos_K, 0, places.table_2PE, c.kv_heads, kv)
        return Keys(embedded, live, h, n, kv, half_q, half_kv, raw)

    def turned(
        self, norm: RMSNorm | None, half_THE: Tensor, other_XHE: Tensor, at_T: Tensor, pos_T: Tensor, shift: int, table_2PE: Tensor,
        rotated: int, out_THE: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Both halves added, their first heads normed and turned, written to `out`; returns those heads before their norm."""
        if norm is None:
            self.ops.turned(half_THE, other_XHE, at_T, pos_T, shift, table_2PE, rotated, out_THE)
            return None
        both = half_THE + other_XHE[at_T]
        raw = both[:, :rotated].clone(memory_format=torch.contiguous_format)
        both[:, :rotated] = self.ops.rms(raw, norm.weight, self.c.eps)
        nothing = self.nothing.expand(1, both.shape[1], -1).contiguous()
        self.ops.turned(both, nothing, torch.zeros_like(at_T), pos_T, shift, table_2PE, rotated, out_THE)
        return raw

    def normed_backward(
        self, norm: RMSNorm | None, sums_XE: Tensor | None, dout_THE: Tensor, raw_THE: Tensor | None
    ) -> None:
        """The gradient of some heads, turned back, becomes that before their norm, in place."""
        if norm is not None and raw_THE is not None and sums_XE is not None:
            width = raw_THE.shape[-1]
            flat = dout_THE.reshape(-1, width).contiguous()
            dx, _ = self.ops.rms_backward(flat, raw_THE.view(-1, width), norm.weight, self.c.eps, sums_XE)
            dout_THE.copy_(dx.view(raw_THE.shape))

    @property
    def head_sums(self) -> tuple[Tensor | None, Tensor | None]:
        """Where the gradients of q_norm and k_norm are added up."""
        return (self.sums[-2], self.sums[-1]) if self.c.norms.qk else (None, None)

    def unit(self, batch: Batch) -> Tensor:
        """Aux states [K, L*D], normed without scale: made again for the way back, since they are large."""
        aux = batch.key_aux_KLD.to(self.dtype)
        width = {"chunks": self.c.hidden, "whole": self.c.hidden * len(self.c.aux_layers)}.get(
            self.c.norms.fc
        )
        return (
            self.ops.rms(aux.view(-1, width), None, self.c.eps).view(len(aux), -1)
            if width
            else aux.flatten(1)
        )

    def _wanted(self, batch: Batch, places: Places, share: Tensor, steps: int) -> Wanted:
        t = self.teacher
        logits = self.ops.rms(batch.last_MD, t.norm_D, t.eps).to(t.head_WD.dtype) @ t.head_WD.T
        draft_id = t.draft_id_V[batch.top1_M]
        live = len(draft_id)
        k_S1 = torch.arange(steps, device=self.device)[:, None]
        inside = (draft_id >= 0)[places.ahead].unfold(0, live, 1)[:steps]
        counts = (batch.steps_M > k_S1) & inside
        target, certainty = self.ops.distribution(logits)
        return Wanted(target, certainty, draft_id, counts * (self.decay ** k_S1.float() * share))


class _Way:
    """One batch on its way forward through the draft steps, and back."""

    def __init__(self, g: Gradients, batch: Batch, places: Places, keys: Keys, steps: int) -> None:
        self.g, self.c, self.ops, self.w, self.d = g, g.c, g.ops, g.w, g.drafter
        self.batch, self.places, self.keys = batch, places, keys
        self.steps, self.live = steps, len(places.pos_M)
        c = self.c
        self.q_SMHE = keys.n_KD.new_empty(self.steps, self.live, c.heads, c.head_dim)
        self.own_SMNE = keys.n_KD.new_empty(max(self.steps - 1, 1), self.live, 2 * c.kv_heads, c.head_dim)

    def forward(self, wanted: Wanted, figures_2SM: Tensor) -> list[Kept]:
        """All draft steps and their losses; figures: the loss and whether drafts hit, written."""
        kept: list[Kept] = []
        before = self.keys.h_KD[self.batch.query_key_M]
        for k in range(self.steps):
            step = self._layer(k, before)
            normed = self.ops.rms(step.h_MD, self.d.norm.weight, self.c.eps)
            kept.append(step._replace(dnormed_MD=self._loss(k, normed, wanted, *figures_2SM[:, k])))
            before = normed if self.c.norms.output else step.h_MD
        return kept

    def _layer(self, k: int, before: Tensor) -> Kept:
        c, ops, w, places, keys = self.c, self.ops, self.w, self.places, self.keys
        q, ahead = self.q_SMHE[k], places.ahead[k : k + self.live]
        n = ops.rms(before, self.d.hidden_norm.weight, c.eps)
        if k:
            both = w.hidden(n).unflatten(1, (-1, c.head_dim))
            half_q, half_kv = both[:, : c.heads], both[:, c.heads :]
            at, own = places.key[k : k + self.live], self.own_SMNE[k - 1]
            raw_k = self.g.turned(
                self.d.k_norm,
                half_kv,
                keys.half_kv_KNE,
                at,
                places.pos_M,
                k,
                places.table_2PE,
                c.kv_heads,
                own,
            )
        else:
            half_q, raw_k = w.hidden_q(n).unflatten(1, (-1, c.head_dim)), None
        raw_q = self.g.turned(
            self.d.q_norm, half_q, keys.half_q_MHE, ahead, places.pos_M, k, places.table_2PE, c.heads, q
        )
        first, lse = documents.attend(q, keys.kv_KNE, self.batch, self.g.scale)
        out, lse = ops.merge(first, lse, q, self.own_SMNE, k, self.g.scale)
        middle = w.o(out.flatten(1), n if c.norms.before_residual else before)
        gate_up = w.gate_up(ops.rms(middle, self.d.post_attention_layernorm.weight, c.eps))
        h = w.down(ops.swiglu(gate_up), middle)
        return Kept(before, out, lse, middle, gate_up, h, h, raw_q, raw_k)

    def _loss(self, k: int, normed_MD: Tensor, wanted: Wanted, loss_M: Tensor, hit_M: Tensor) -> Tensor:
        """The loss of one step and whether drafts hit, written; its gradient of norm(h), returned."""
        head, rows = self.w.head, max(1, CHUNK_BYTES // (self.c.draft_vocab * normed_MD.element_size()))
        dnormed = torch.empty_like(normed_MD)
        for i in range(0, self.live, rows):
            part = slice(i, i + rows)
            at = self.places.ahead[k : k + self.live][part]
            logits = head(normed_MD[part])
            self.ops.loss(
                logits, wanted.target_MW, wanted.certainty_M, at, wanted.weight_SM[k, part], wanted.draft_id_M, self.g.kind,
                loss_M[part], hit_M[part],
            )  # fmt: skip
            head.add(logits, normed_MD[part])
            head.back(logits, out_TX=dnormed[part])
        return dnormed

    # ---- the way back ----

    def back(self, kept: list[Kept]) -> None:
        c, s = self.c, self.steps
        empty = lambda *shape: torch.empty(*shape, device=self.g.device)  # noqa: E731
        self.shares_S2SMH = empty(s, 2, max(s - 1, 1), self.live, c.heads)
        self.dout_SMHE = torch.empty_like(self.q_SMHE)
        self.dkv_KNE = empty(*self.keys.kv_KNE.shape).zero_()
        self.dhalf_MX = empty(self.live, self.g.q_width + self.dkv_KNE[0].numel()).zero_()  # of all steps
        dbefore: Tensor | None = None
        for k in reversed(range(s)):
            before, out, lse = kept[-1].before_MD, kept[-1].out_MHE, kept[-1].lse_HM
            raw = kept[-1].raw_q_MHE, kept[-1].raw_k_MNE
            dmiddle = self._mlp_back(kept.pop(), dbefore)  # its tensors go before attention takes its memory
            dhalf = self._qkv_back(k, self._attention_back(k, out, lse, dmiddle), *raw)
            if not k:
                self._keys_back(dhalf, dmiddle)
                return
            of_norm, past = (dmiddle, None) if c.norms.before_residual else (None, dmiddle)
            dn = self.w.hidden.back(dhalf, of_norm)
            dbefore, n = self.ops.rms_backward(
                dn, before, self.d.hidden_norm.weight, c.eps, self.g.sums[0], past
            )
            self.w.hidden.add(dhalf, n)

    def _mlp_back(self, step: Kept, dbefore_MD: Tensor | None) -> Tensor:
        """From the gradients of norm(h), and of what the next step read, to that of the state after attention."""
        ops, w, d, c = self.ops, self.w, self.d, self.c
        dnormed = step.dnormed_MD
        if c.norms.output and dbefore_MD is not None:
            dnormed, dbefore_MD = dnormed + dbefore_MD, None
        dh, _ = ops.rms_backward(dnormed, step.h_MD, d.norm.weight, c.eps, self.g.sums[2], dbefore_MD)
        act = ops.swiglu_backward(w.down.back(dh), step.both_M2I)
        w.down.add(dh, act)
        dx, norm = w.gate_up.back(step.both_M2I), d.post_attention_layernorm
        dmiddle, x = ops.rms_backward(dx, step.middle_MD, norm.weight, c.eps, self.g.sums[1], dh)
        w.gate_up.add(step.both_M2I, x)
        return dmiddle

    def _attention_back(self, k: int, out_MHE: Tensor, lse_HM: Tensor, dmiddle_MD: Tensor) -> Tensor:
        """The gradient of q; those of the step-0 keys and values are added up."""
        ops, w, dout, q = self.ops, self.w, self.dout_SMHE[k], self.q_SMHE[k]
        w.o.add(dmiddle_MD, out_MHE.flatten(1))
        w.o.back(dmiddle_MD, out_TX=dout.flatten(1))
        dq, *dkey_and_value = documents.attend_backward(
            dout, q, self.keys.kv_KNE, out_MHE, lse_HM, self.batch, self.g.scale
        )
        for total, x in zip(self.dkv_KNE.flatten(1).chunk(2, 1), dkey_and_value, strict=True):
            ops.add_rows(total, x.flatten(1))
        return ops.merge_backward(
            dout, out_MHE, lse_HM, q, self.own_SMNE, k, self.g.scale, dq, self.shares_S2SMH[k]
        )

    def _qkv_back(self, k: int, dq_MHE: Tensor, raw_q_MHE: Tensor | None, raw_k_MNE: Tensor | None) -> Tensor:
        """The gradient of the hidden half of q, and of k and v after step 0; also added up for the embedding's half, k places on."""
        c, ops, places = self.c, self.ops, self.places
        dhalf = dq_MHE.new_empty(self.live, self.dhalf_MX.shape[1] if k else self.g.q_width)
        by_head = dhalf.unflatten(1, (-1, c.head_dim))
        q_sums, k_sums = self.g.head_sums
        ops.turned_backward(dq_MHE, places.pos_M, k, places.table_2PE, c.heads, by_head[:, : c.heads])
        self.g.normed_backward(self.d.q_norm, q_sums, by_head[:, : c.heads], raw_q_MHE)
        if k:
            own = ops.own_backward(
                self.dout_SMHE, self.q_SMHE, self.shares_S2SMH, k, self.g.scale, c.kv_heads
            )
            ops.turned_backward(own, places.pos_M, k, places.table_2PE, c.kv_heads, by_head[:, c.heads :])
            own_keys = by_head[:, c.heads : c.heads + c.kv_heads]
            self.g.normed_backward(self.d.k_norm, k_sums, own_keys, raw_k_MNE)
        ops.add_rows(self.dhalf_MX[k:, : dhalf.shape[1]], dhalf[: self.live - k])
        return dhalf

    def _keys_back(self, dq_MX: Tensor, dmiddle_MD: Tensor) -> None:
        """Step 0's q of the live positions, k and v of every key, fc, and the embedding's halves of all steps."""
        c, ops, w, keys, q = self.c, self.ops, self.w, self.keys, self.g.q_width
        at, dkv_KX = self.batch.query_key_M, keys.kv_KNE.new_empty(keys.kv_KNE.shape).flatten(1)
        by_head = dkv_KX.unflatten(1, (-1, c.head_dim))
        ops.turned_backward(self.dkv_KNE, self.batch.key_pos_K, 0, self.places.table_2PE, c.kv_heads, by_head)
        self.g.normed_backward(self.d.k_norm, self.g.head_sums[1], by_head[:, : c.kv_heads], keys.raw_KNE)
        w.hidden_q.add(dq_MX, keys.n_KD[at])
        w.hidden_kv.add(dkv_KX, keys.n_KD)
        dn_KD = w.hidden_kv.back(dkv_KX)
        ops.add_rows(dn_KD, w.hidden_q.back(dq_MX), at)
        residual = torch.zeros_like(dn_KD)
        ops.add_rows(dn_KD if c.norms.before_residual else residual, dmiddle_MD, at)
        dh, _ = ops.rms_backward(dn_KD, keys.h_KD, self.d.hidden_norm.weight, c.eps, self.g.sums[0], residual)
        w.fc.add(dh, self.g.unit(self.batch))
        w.embedded_q.add(self.dhalf_MX[:, :q].to(dq_MX.dtype), keys.live_MD)
        ops.add_rows(dkv_KX, self.dhalf_MX[:, q:], at)
        w.embedded_kv.add(dkv_KX, keys.embedded_KD)
