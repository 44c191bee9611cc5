"""What lies between the matrix products of a training step, forward and backward, in plain PyTorch: used on a CPU, and the
specification of the GPU's kernels (drafter/kernels.py), which have the same names, arguments and results.

Everything is computed in float32 and rounded once, to the type of the inputs. Functions that end in _backward turn the gradient
of a function's result into that of its input; sums over rows that belong to a weight are added to a given tensor.

T rows, D width, I width of the MLP, H heads of queries, N of keys, E width of a head, S draft steps, M live positions, C rows of
one chunk of logits, W draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2**18  # logits at once: they stay in a CPU's cache


# ---- RMSNorm ----


def rms(x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """RMSNorm, with or without its scale."""
    return F.rms_norm(x_TD.float(), (x_TD.shape[-1],), weight_D, eps).to(x_TD.dtype)


def norm_sums(width: int, device: torch.device) -> Tensor:
    """Where rms_backward adds the gradient of a scale: sum it over its rows."""
    return torch.zeros(1, width, device=device)


def rms_backward(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, sums_XD: Tensor, more_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of x, plus `more`, and the norm's result, computed again."""
    x, dy = x_TD.float(), dy_TD.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * scale
    sums_XD[0] += (dy * unit).sum(0)
    dy = dy * weight_D
    dx = scale * (dy - unit * (dy * unit).mean(-1, keepdim=True))
    if more_TD is not None:
        dx = dx + more_TD.float()
    return dx.to(x_TD.dtype), (unit * weight_D).to(x_TD.dtype)


# ---- SwiGLU ----


def swiglu(both_T2I: Tensor) -> Tensor:
    """silu(gate) * up of [gate; up]."""
    gate, up = both_T2I.float().chunk(2, -1)
    return (F.silu(gate) * up).to(both_T2I.dtype)


def swiglu_backward(dout_TI: Tensor, both_T2I: Tensor) -> Tensor:
    """Writes the gradient of [gate; up] over them; returns the result, computed again."""
    gate, up = both_T2I.float().chunk(2, -1)
    share = torch.sigmoid(gate)
    silu, dout = gate * share, dout_TI.float()
    again = (silu * up).to(both_T2I.dtype)
    both_T2I.copy_(torch.cat([dout * up * (share + silu * (1 - share)), dout * silu], -1))
    return again


# ---- the two halves of q, k, v, added and rotated ----


def turned(
    half_THE: Tensor, other_XHE: Tensor, at_T: Tensor, pos_T: Tensor, shift: int, table_2PE: Tensor, rotated: int,
    out_THE: Tensor,
) -> None:  # fmt: skip
    """half[t] + other[at[t]], whose first `rotated` heads are turned to position pos[t] + shift, written to `out`.

    table: cosines and sines of every position, float32; its width is half of what is rotated of a head.
    """
    x = half_THE.float() + other_XHE[at_T].float()
    out_THE.copy_(torch.cat([_turn(x[:, :rotated], table_2PE[:, pos_T + shift], 1), x[:, rotated:]], 1))


def turned_backward(
    dout_THE: Tensor, pos_T: Tensor, shift: int, table_2PE: Tensor, rotated: int, out_THE: Tensor
) -> None:
    """The gradient of either half, written to `out`."""
    dout = dout_THE.float()
    back = _turn(dout[:, :rotated], table_2PE[:, pos_T + shift], -1)
    out_THE.copy_(torch.cat([back, dout[:, rotated:]], 1))


def _turn(x_THE: Tensor, table_2TE: Tensor, sign: int) -> Tensor:
    cos, sin = table_2TE[0][:, None], table_2TE[1][:, None] * sign
    half = cos.shape[-1]
    a, b, rest = x_THE[..., :half], x_THE[..., half : 2 * half], x_THE[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


# ---- a query's own keys of the later draft steps, merged with its attention over the step-0 keys ----


def merge(
    first_MHE: Tensor, lse_HM: Tensor, q_MHE: Tensor, own_SMNE: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over step-0 keys and own keys 1..k together, [M, H, E], and its log-sum-exp [H, M]. own: keys, then values, of step
    1, 2, … along N."""
    lse, out = lse_HM.T, first_MHE.float()
    if k:
        scores_HMS, values = _own(q_MHE, own_SMNE[:k], scale)
        scores = scores_HMS.permute(1, 0, 2)  # M H S
        both = torch.logsumexp(torch.cat([lse[..., None], scores], -1), -1)
        out = out * (lse - both).exp()[..., None]
        out = out + torch.einsum("mhs,smhe->mhe", (scores - both[..., None]).exp(), values)
        lse = both
    return out.to(q_MHE.dtype), lse.T.contiguous()


def _own(q_MHE: Tensor, own_SMNE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scores [H, M, S], and values [S, M, H, E]."""
    keys, values = own_SMNE.float().chunk(2, 2)
    groups = q_MHE.shape[1] // keys.shape[2]
    keys, values = keys.repeat_interleave(groups, 2), values.repeat_interleave(groups, 2)
    return torch.einsum("mhe,smhe->hms", q_MHE.float(), keys) * scale, values


def merge_backward(
    dout_MHE: Tensor, out_MHE: Tensor, lse_HM: Tensor, q_MHE: Tensor, own_SMNE: Tensor, k: int, scale: float,
    dq_MHE: Tensor, shares_2SMH: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of q [M, H, E], that through the step-0 keys (dq) included. Leaves the own keys' shares of the attention, and the
    gradients of their scores, in `shares`, for own_backward."""
    dq = dq_MHE.float()
    if k:
        scores_HMS, values = _own(q_MHE, own_SMNE[:k], scale)
        share = (scores_HMS - lse_HM[..., None]).exp().permute(2, 1, 0)  # S M H
        dout = dout_MHE.float()
        delta = (dout * out_MHE.float()).sum(-1)
        dscore = share * (torch.einsum("mhe,smhe->smh", dout, values) - delta)
        shares_2SMH[0, :k], shares_2SMH[1, :k] = share, dscore
        groups = q_MHE.shape[1] // (own_SMNE.shape[2] // 2)
        keys = own_SMNE[:k, :, : own_SMNE.shape[2] // 2].float().repeat_interleave(groups, 2)
        dq = dq + torch.einsum("smh,smhe->mhe", dscore, keys) * scale
    return dq.to(q_MHE.dtype)


def own_backward(
    dout_SMHE: Tensor, q_SMHE: Tensor, shares_S2SMH: Tensor, j: int, scale: float, heads: int
) -> Tensor:
    """The gradient [M, 2N, E] of the own keys and values of draft step j, from the queries of steps j and later. heads: N."""
    dout, q = dout_SMHE[j:].float(), q_SMHE[j:].float()
    share, dscore = shares_S2SMH[j:, 0, j - 1], shares_S2SMH[j:, 1, j - 1]
    dkey = torch.einsum("smh,smhe->mhe", dscore, q) * scale
    dvalue = torch.einsum("smh,smhe->mhe", share, dout)
    whole = q_SMHE.new_zeros(q_SMHE.shape[1], 2 * heads, q_SMHE.shape[3])
    for at, x in ((0, dkey), (heads, dvalue)):
        whole[:, at : at + heads] = x.unflatten(1, (heads, -1)).sum(2).to(whole.dtype)
    return whole


# ---- the loss: its value and its gradient in one go ----


def _blocks(logits_CW: Tensor) -> list[slice]:
    rows = max(1, BLOCK // logits_CW.shape[1])
    return [slice(i, i + rows) for i in range(0, len(logits_CW), rows)]


def distribution(logits_MW: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of every row, and its sum of p log p, float32. (A kernel writes it over the logits, in their type.)"""
    p_MW = torch.empty(logits_MW.shape, device=logits_MW.device)
    certainty_M = p_MW.new_empty(len(p_MW))
    for part in _blocks(logits_MW):
        logp = logits_MW[part].float().log_softmax(-1)
        torch.exp(logp, out=p_MW[part])
        certainty_M[part] = torch.linalg.vecdot(p_MW[part], logp)
    return p_MW, certainty_M


def loss(
    draft_CW: Tensor, target_MW: Tensor, certainty_M: Tensor, at_C: Tensor, weight_C: Tensor, wanted_M: Tensor,
    kind: str, loss_C: Tensor, hit_C: Tensor,
) -> None:  # fmt: skip
    """Of pairs whose target's distribution is row at[c]: the weighted loss, whether the draft's argmax is the wanted id, and, written
    over the draft's logits, the loss's gradient. A pair of weight 0 gives zeros. Source: eyas.drafter.loss, written out."""
    for part in _blocks(draft_CW):
        at, weight = at_C[part], weight_C[part]
        draft = draft_CW[part].float()
        together = int(at[-1] - at[0]) == len(at) - 1
        p = target_MW[at[0] : at[0] + len(at)] if together else target_MW[at]
        most, best = draft.max(-1, keepdim=True)
        drafted = (draft - most).exp_()
        total = drafted.sum(-1, keepdim=True)
        hit_C[part] = (best[:, 0] == wanted_M[at]) * (weight != 0)
        if kind == "kl":
            value = certainty_M[at] - torch.linalg.vecdot(p, draft) + (most + total.log())[:, 0] * p.sum(-1)
            gradient = torch.addcmul(drafted.mul_(weight[:, None] / total), p, weight[:, None], value=-1)
        else:
            drafted /= total
            less = drafted < p
            both = torch.where(less, drafted, p).sum(-1, keepdim=True).clamp_min(1e-9)
            inside = (drafted * less).sum(-1, keepdim=True)
            value = -both[:, 0].log()
            gradient = drafted * (inside - less.float()) * (weight[:, None] / both)
        loss_C[part] = value * weight
        draft_CW[part] = gradient.to(draft_CW.dtype)


# ---- weights ----


def fold(to_YX: Tensor, weight_YX: Tensor, scale_X: Tensor | None = None) -> None:
    """Writes weight * scale, in the type of `to`."""
    to_YX.copy_(weight_YX if scale_X is None else weight_YX * scale_X)


def unfold(grad_YX: Tensor, weight_YX: Tensor, scale_X: Tensor, scale_grad_X: Tensor) -> None:
    """The gradient of weight * scale becomes that of weight, in place, and what it says of scale is added to scale_grad."""
    scale_grad_X += (grad_YX * weight_YX).sum(0)
    grad_YX *= scale_X


# ---- sums ----


def add_rows(sum_YX: Tensor, x_TX: Tensor, at_T: Tensor | None = None) -> None:
    """sum[at[t]] += x[t], or sum[t] += x[t]; rows of x are the first of `at` and of the sum. No row may be named twice."""
    if at_T is None:
        sum_YX[: len(x_TX)] += x_TX
    else:
        sum_YX.index_add_(0, at_T[: len(x_TX)], x_TX.to(sum_YX.dtype))


def add_product(sum_XY: Tensor, left_TX: Tensor, right_TY: Tensor, first: bool) -> None:
    """sum += left.T @ right, or = where it is the first; sum is float32."""
    if left_TX.dtype == torch.float32:
        torch.addmm(sum_XY, left_TX.T, right_TY, beta=0 if first else 1, out=sum_XY)
    elif first:
        sum_XY.copy_(left_TX.T @ right_TY)
    else:
        sum_XY += left_TX.T @ right_TY
