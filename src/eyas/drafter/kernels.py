"""What lies between the matrix products of a training step, on a GPU: Triton kernels with the names, arguments and results of
drafter/pieces.py, which says what each computes and is what tests compare them with.

One program works on one row, or on some heads of one row; arithmetic is float32. Nothing here waits for the GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements of some heads of a row
PROGRAMS_PER_CORE = 2  # of rms_backward, each of which keeps a partial sum
LOW = tl.constexpr(-1e30)  # below every logit, and finite: differences of two are no NaN


def _warps(elements: int) -> int:
    return min(16, max(1, elements // 512))


# ---- RMSNorm ----


def rms(x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    x = x_TD.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    _rms[(x.numel() // width,)](
        x, weight_D, out, eps, width, SCALED=weight_D is not None, BLOCK=block, num_warps=_warps(block)
    )
    return out


@triton.jit
def _rms(x, weight, out, eps, width, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    there = at < width
    v = tl.load(x + row + at, there, other=0.0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v) / width + eps)
    if SCALED:
        v *= tl.load(weight + at, there, other=0.0)
    tl.store(out + row + at, v, there)


def norm_sums(width: int, device: torch.device) -> Tensor:
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return torch.zeros(PROGRAMS_PER_CORE * cores, width, device=device)


def rms_backward(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, sums_XD: Tensor, more_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dx, y = torch.empty_like(x_TD), torch.empty_like(x_TD)
    rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    _rms_backward[(len(sums_XD),)](
        dy_TD, x_TD, weight_D, more_TD, sums_XD, dx, y, eps, rows, width, MORE=more_TD is not None, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return dx, y


@triton.jit(do_not_specialize=["rows"])
def _rms_backward(
    dy, x, weight, more, sums, dx, y, eps, rows, width, MORE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    there = at < width
    w = tl.load(weight + at, there, other=0.0)
    begin, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    mine = sums + begin * width + at
    total = tl.load(mine, there, other=0.0)
    for i in range(tl.cdiv(rows - tl.program_id(0), programs)):
        row = (begin + i * programs) * width + at
        v = tl.load(x + row, there, other=0.0).to(tl.float32)
        g = tl.load(dy + row, there, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v) / width + eps)
        v *= scale
        total += g * v
        tl.store(y + row, v * w, there)
        g *= w
        g = scale * (g - v * (tl.sum(g * v) / width))
        if MORE:
            g += tl.load(more + row, there, other=0.0).to(tl.float32)
        tl.store(dx + row, g, there)
    tl.store(mine, total, there)


# ---- SwiGLU ----


def swiglu(both_T2I: Tensor) -> Tensor:
    rows, width = both_T2I.shape[0], both_T2I.shape[1] // 2
    out = both_T2I.new_empty(rows, width)
    _swiglu[(rows, triton.cdiv(width, TILE))](both_T2I, out, width, BLOCK=TILE)
    return out


@triton.jit
def _swiglu(both, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(both + row * 2 * width + at, there, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, there, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, gate * tl.sigmoid(gate) * up, there)


def swiglu_backward(dout_TI: Tensor, both_T2I: Tensor) -> Tensor:
    again = torch.empty_like(dout_TI)
    rows, width = dout_TI.shape
    _swiglu_backward[(rows, triton.cdiv(width, TILE))](dout_TI, both_T2I, again, width, BLOCK=TILE)
    return again


@triton.jit
def _swiglu_backward(dout, both, again, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gates, ups = both + row * 2 * width + at, both + row * 2 * width + width + at
    gate = tl.load(gates, there, other=0.0).to(tl.float32)
    up = tl.load(ups, there, other=0.0).to(tl.float32)
    g = tl.load(dout + row * width + at, there, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(again + row * width + at, silu * up, there)
    tl.store(gates, g * up * (share + silu * (1 - share)), there)
    tl.store(ups, g * silu, there)


# ---- the two halves of q, k, v, added and rotated ----


def _heads_at_once(heads: int, width: int) -> int:
    return min(triton.next_power_of_2(heads), max(1, TILE // triton.next_power_of_2(width)))


def turned(
    half_THE: Tensor, other_XHE: Tensor, at_T: Tensor, pos_T: Tensor, shift: int, table_2PE: Tensor, rotated: int,
    out_THE: Tensor,
) -> None:  # fmt: skip
    _launch_turn(half_THE, other_XHE, at_T, pos_T, shift, table_2PE, rotated, out_THE)


def turned_backward(
    dout_THE: Tensor, pos_T: Tensor, shift: int, table_2PE: Tensor, rotated: int, out_THE: Tensor
) -> None:
    _launch_turn(dout_THE, None, None, pos_T, shift, table_2PE, rotated, out_THE)


def _launch_turn(
    x_THE: Tensor, other: Tensor | None, at: Tensor | None, pos: Tensor, shift: int, table: Tensor, rotated: int, out: Tensor
) -> None:  # fmt: skip
    """With `other` it is added and turned forward; without, x is turned back."""
    rows, heads, width = x_THE.shape
    half, some = table.shape[2], _heads_at_once(heads, width)
    if x_THE.stride()[1:] != (width, 1) or out.stride()[1:] != (width, 1):
        raise ValueError("heads of a row must lie side by side")
    rest = width - 2 * half
    _turn[(rows, triton.cdiv(heads, some))](
        x_THE, other, at, pos, table, out, x_THE.stride(0), 0 if other is None else other.stride(0), out.stride(0),
        shift, table.shape[1], heads, rotated, width, half, FORWARD=other is not None, HEADS=some,
        HALF=triton.next_power_of_2(half), REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["shift", "rotated", "positions"])
def _turn(
    x, other, at, pos, table, out, x_row, other_row, out_row, shift, positions, heads, rotated, width, half,
    FORWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    col = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (col < half)
    first = head * width + col
    a = tl.load(x + row * x_row + first, there, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_row + first + half, there, other=0.0).to(tl.float32)
    if FORWARD:
        base = other + tl.load(at + row) * other_row
        a += tl.load(base + first, there, other=0.0).to(tl.float32)
        b += tl.load(base + first + half, there, other=0.0).to(tl.float32)
    angle = (tl.load(pos + row) + shift) * half + col
    cos = tl.where(head < rotated, tl.load(table + angle, col < half, other=1.0), 1.0)
    sin = tl.where(head < rotated, tl.load(table + positions * half + angle, col < half, other=0.0), 0.0)
    if not FORWARD:
        sin = -sin
    tl.store(out + row * out_row + first, a * cos - b * sin, there)
    tl.store(out + row * out_row + first + half, b * cos + a * sin, there)
    if REST > 0:
        col = tl.arange(0, REST)[None, :]
        there = (head < heads) & (col < width - 2 * half)
        first = head * width + 2 * half + col
        c = tl.load(x + row * x_row + first, there, other=0.0).to(tl.float32)
        if FORWARD:
            base = other + tl.load(at + row) * other_row
            c += tl.load(base + first, there, other=0.0).to(tl.float32)
        tl.store(out + row * out_row + first, c, there)


# ---- a query's own keys of the later draft steps, merged with its attention over the step-0 keys ----


def merge(
    first_MHE: Tensor, lse_HM: Tensor, q_MHE: Tensor, own_SMNE: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = torch.empty_like(q_MHE), torch.empty_like(lse_HM)
    rows, heads, width = q_MHE.shape
    some, key_heads = _heads_at_once(heads, width), own_SMNE.shape[2] // 2
    _merge[(rows, triton.cdiv(heads, some))](
        first_MHE, lse_HM, q_MHE, own_SMNE, out, lse, k, scale, rows, heads, key_heads, width,
        GROUP=heads // key_heads, HEADS=some, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["k", "rows"])
def _merge(
    first, lse, q, own, out, lse_out, k, scale, rows, heads, key_heads, width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, WIDTH)[None, :]
    there = (head < heads)[:, None] & (col < width)
    at = row * heads * width + head[:, None] * width + col
    most = tl.load(lse + head.to(tl.int64) * rows + row, head < heads, other=0.0)
    total = tl.zeros([HEADS], tl.float32) + 1
    got = tl.load(first + at, there, other=0.0).to(tl.float32)
    query = tl.load(q + at, there, other=0.0).to(tl.float32)
    place = own + row * 2 * key_heads * width + (head // GROUP)[:, None] * width + col
    for _ in range(k):
        key = tl.load(place, there, other=0.0).to(tl.float32)
        value = tl.load(place + key_heads * width, there, other=0.0).to(tl.float32)
        score = tl.sum(query * key, 1) * scale
        higher = tl.maximum(most, score)
        before, now = tl.exp(most - higher), tl.exp(score - higher)
        got = got * before[:, None] + value * now[:, None]
        total = total * before + now
        most = higher
        place += rows.to(tl.int64) * 2 * key_heads * width
    tl.store(out + at, got / total[:, None], there)
    tl.store(lse_out + head.to(tl.int64) * rows + row, most + tl.log(total), head < heads)


def merge_backward(
    dout_MHE: Tensor, out_MHE: Tensor, lse_HM: Tensor, q_MHE: Tensor, own_SMNE: Tensor, k: int, scale: float,
    dq_MHE: Tensor, shares_2SMH: Tensor,
) -> Tensor:  # fmt: skip
    dq = torch.empty_like(q_MHE)
    rows, heads, width = q_MHE.shape
    some, key_heads = _heads_at_once(heads, width), own_SMNE.shape[2] // 2
    _merge_backward[(rows, triton.cdiv(heads, some))](
        dout_MHE, out_MHE, lse_HM, q_MHE, own_SMNE, dq_MHE, shares_2SMH, dq, k, scale, rows, shares_2SMH.shape[1],
        heads, key_heads, width, GROUP=heads // key_heads, HEADS=some, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["k", "rows", "slots"])
def _merge_backward(
    dout, out, lse, q, own, dq, shares, dq_out, k, scale, rows, slots, heads, key_heads, width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, WIDTH)[None, :]
    there = (head < heads)[:, None] & (col < width)
    at = row * heads * width + head[:, None] * width + col
    all_lse = tl.load(lse + head.to(tl.int64) * rows + row, head < heads, other=0.0)
    query = tl.load(q + at, there, other=0.0).to(tl.float32)
    g = tl.load(dout + at, there, other=0.0).to(tl.float32)
    delta = tl.sum(g * tl.load(out + at, there, other=0.0).to(tl.float32), 1)
    total = tl.load(dq + at, there, other=0.0).to(tl.float32)
    place = own + row * 2 * key_heads * width + (head // GROUP)[:, None] * width + col
    share_at = shares + row * heads + head
    second = slots.to(tl.int64) * rows * heads  # from shares to gradients of scores
    for _ in range(k):
        key = tl.load(place, there, other=0.0).to(tl.float32)
        value = tl.load(place + key_heads * width, there, other=0.0).to(tl.float32)
        share = tl.exp(tl.sum(query * key, 1) * scale - all_lse)
        dscore = share * (tl.sum(g * value, 1) - delta)
        total += dscore[:, None] * key * scale
        tl.store(share_at, share, head < heads)
        tl.store(share_at + second, dscore, head < heads)
        place += rows.to(tl.int64) * 2 * key_heads * width
        share_at += rows.to(tl.int64) * heads
    tl.store(dq_out + at, total, there)


def own_backward(
    dout_SMHE: Tensor, q_SMHE: Tensor, shares_S2SMH: Tensor, j: int, scale: float, heads: int
) -> Tensor:
    steps, rows, q_heads, width = q_SMHE.shape
    out = q_SMHE.new_empty(rows, 2 * heads, width)
    some = _heads_at_once(heads, width)
    _own_backward[(rows, triton.cdiv(heads, some))](
        dout_SMHE, q_SMHE, shares_S2SMH, out, j, steps, scale, rows, shares_S2SMH.shape[2], q_heads, heads, width,
        GROUP=q_heads // heads, HEADS=some, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["j", "steps", "rows", "slots"])
def _own_backward(
    dout, q, shares, out, j, steps, scale, rows, slots, q_heads, heads, width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, WIDTH)[None, :]
    there = (head < heads)[:, None] & (col < width)
    dkey = tl.zeros([HEADS, WIDTH], tl.float32)
    dvalue = tl.zeros([HEADS, WIDTH], tl.float32)
    wide = rows.to(tl.int64)
    for k in range(j, steps):
        for g in range(GROUP):
            query_head = head * GROUP + g
            at = (k * wide + row) * q_heads * width + query_head[:, None] * width + col
            share_at = shares + ((k * 2 * slots + j - 1) * wide + row) * q_heads + query_head
            share = tl.load(share_at, head < heads, other=0.0)
            dscore = tl.load(share_at + slots * wide * q_heads, head < heads, other=0.0)
            dkey += dscore[:, None] * tl.load(q + at, there, other=0.0).to(tl.float32)
            dvalue += share[:, None] * tl.load(dout + at, there, other=0.0).to(tl.float32)
    to = out + row * 2 * heads * width + head[:, None] * width + col
    tl.store(to, dkey * scale, there)
    tl.store(to + heads * width, dvalue, there)


# ---- the loss: its value and its gradient in one go ----


def distribution(logits_MW: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = logits_MW.shape
    certainty = torch.empty(rows, device=logits_MW.device)
    block = min(4096, triton.next_power_of_2(width))
    _distribution[(rows,)](
        logits_MW, certainty, logits_MW.stride(0), width, BLOCK=block, num_warps=_warps(block)
    )
    return logits_MW, certainty


@triton.jit
def _distribution(x, certainty, x_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    most, total, _ = _scan(x, width, BLOCK)
    lse = most + tl.log(total)
    value = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logp = tl.load(x + at, at < width, other=LOW).to(tl.float32) - lse
        p = tl.exp(logp).to(x.dtype.element_ty).to(tl.float32)  # as it is read again
        value += tl.where(at < width, p * logp, 0.0)
        tl.store(x + at, p, at < width)
    tl.store(certainty + row, tl.sum(value, 0))


@triton.jit
def _scan(x, width, BLOCK: tl.constexpr):
    """The highest element of a row, the sum of exp(element - highest), and where the first highest one is."""
    most = tl.full([BLOCK], LOW, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < width, other=LOW).to(tl.float32)
        higher = tl.maximum(most, v)
        total = total * tl.exp(most - higher) + tl.exp(v - higher)
        where = tl.where(v > most, at, where)
        most = higher
    highest = tl.max(most, 0)
    first = tl.min(tl.where(most == highest, where, width), 0)
    return highest, tl.sum(total * tl.exp(most - highest), 0), first


def loss(
    draft_CW: Tensor, target_MW: Tensor, certainty_M: Tensor, at_C: Tensor, weight_C: Tensor, wanted_M: Tensor,
    kind: str, loss_C: Tensor, hit_C: Tensor,
) -> None:  # fmt: skip
    rows, width = draft_CW.shape
    block = min(4096, triton.next_power_of_2(width))
    _loss[(rows,)](
        draft_CW, target_MW, certainty_M, at_C, weight_C, wanted_M, loss_C, hit_C, draft_CW.stride(0), target_MW.stride(0),
        width, KL=kind == "kl", BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


@triton.jit
def _loss(
    draft, target, certainty, at, weights, wanted, losses, hits, draft_row, target_row, width,
    KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = draft + row * draft_row
    weight = tl.load(weights + row)
    if weight == 0:
        for start in range(0, width, BLOCK):
            col = start + tl.arange(0, BLOCK)
            tl.store(d + col, tl.zeros([BLOCK], tl.float32), col < width)
        tl.store(losses + row, 0.0)
        tl.store(hits + row, 0.0)
        return
    place = tl.load(at + row)
    t = target + place * target_row
    most, total, best = _scan(d, width, BLOCK)
    lse = most + tl.log(total)
    value = tl.zeros([BLOCK], tl.float32)
    both, inside = 1.0, 0.0
    if not KL:
        less = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            col = start + tl.arange(0, BLOCK)
            q = tl.exp(tl.load(d + col, col < width, other=LOW).to(tl.float32) - lse)
            p = tl.load(t + col, col < width, other=0.0).to(tl.float32)
            value += tl.minimum(p, q)
            less += tl.where(q < p, q, 0.0)
        both = tl.maximum(tl.sum(value, 0), 1e-9)
        inside = tl.sum(less, 0)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        logq = tl.load(d + col, col < width, other=LOW).to(tl.float32) - lse
        p, q = tl.load(t + col, col < width, other=0.0).to(tl.float32), tl.exp(logq)
        if KL:
            value += tl.where(col < width, p * logq, 0.0)
            gradient = q - p
        else:
            gradient = q * (inside - tl.where(q < p, 1.0, 0.0)) / both
        tl.store(d + col, gradient * weight, col < width)
    if KL:
        tl.store(losses + row, (tl.load(certainty + place) - tl.sum(value, 0)) * weight)
    else:
        tl.store(losses + row, -tl.log(both) * weight)
    tl.store(hits + row, tl.where(best == tl.load(wanted + place), 1.0, 0.0))


# ---- weights ----


def fold(to_YX: Tensor, weight_YX: Tensor, scale_X: Tensor | None = None) -> None:
    rows, width = weight_YX.shape
    _fold[(rows, triton.cdiv(width, TILE))](
        to_YX,
        weight_YX,
        scale_X,
        to_YX.stride(0),
        weight_YX.stride(0),
        width,
        SCALED=scale_X is not None,
        BLOCK=TILE,
    )


@triton.jit
def _fold(to, weight, scale, to_row, weight_row, width, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(weight + row * weight_row + col, col < width, other=0.0)
    if SCALED:
        v *= tl.load(scale + col, col < width, other=0.0)
    tl.store(to + row * to_row + col, v, col < width)


def unfold(grad_YX: Tensor, weight_YX: Tensor, scale_X: Tensor, scale_grad_X: Tensor) -> None:
    rows, width = grad_YX.shape
    parts = min(64, triton.cdiv(rows, 8))
    sums = torch.empty(parts, width, device=grad_YX.device)
    _unfold[(parts, triton.cdiv(width, 128))](
        grad_YX,
        weight_YX,
        scale_X,
        sums,
        grad_YX.stride(0),
        weight_YX.stride(0),
        rows,
        width,
        ROWS=8,
        COLUMNS=128,
    )
    scale_grad_X += sums.sum(0)


@triton.jit
def _unfold(
    grad, weight, scale, sums, grad_row, weight_row, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(scale + col, col < width, other=0.0)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(tl.cdiv(rows - tl.program_id(0) * ROWS, parts * ROWS)):
        row = (first + i * parts) * ROWS + tl.arange(0, ROWS)[:, None]
        there = (row < rows) & (col < width)[None, :]
        at = grad + row * grad_row + col[None, :]
        g = tl.load(at, there, other=0.0)
        total += g * tl.load(weight + row * weight_row + col[None, :], there, other=0.0)
        tl.store(at, g * factor, there)
    tl.store(sums + first * width + col, tl.sum(total, 0), col < width)


# ---- sums ----


def add_rows(sum_YX: Tensor, x_TX: Tensor, at_T: Tensor | None = None) -> None:
    rows, width = x_TX.shape
    _add_rows[(rows, triton.cdiv(width, TILE))](
        sum_YX, x_TX, at_T, sum_YX.stride(0), x_TX.stride(0), width, PLACED=at_T is not None, BLOCK=TILE
    )


@triton.jit
def _add_rows(total, x, at, total_row, x_row, width, PLACED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = total + (tl.load(at + row) if PLACED else row) * total_row + col
    v = tl.load(x + row * x_row + col, col < width, other=0.0).to(tl.float32)
    tl.store(to, tl.load(to, col < width, other=0.0).to(tl.float32) + v, col < width)


def add_product(sum_XY: Tensor, left_TX: Tensor, right_TY: Tensor, first: bool) -> None:
    if left_TX.dtype == torch.float32:
        torch.addmm(sum_XY, left_TX.T, right_TY, beta=0 if first else 1, out=sum_XY)
    elif first:
        torch.ops.aten.mm.dtype_out(left_TX.T, right_TY, torch.float32, out=sum_XY)
    else:
        torch.ops.aten.addmm.dtype_out(sum_XY, left_TX.T, right_TY, torch.float32, out=sum_XY)
