"""Every Triton kernel against its plain twin, in Triton's interpreter where there is no GPU."""

import pytest
import torch

from eyas.contract import Rope
from eyas.drafter import kernels, pieces
from eyas.drafter.attention import frequencies

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16]
WIDTHS = [32, 100]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(found, wanted, dtype):
    worst = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert worst < (1e-5 if dtype == torch.float32 else 6e-3), worst


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms(dtype, width):
    x, w = random(7, width, dtype=dtype), random(width)
    close(kernels.rms(x, w, 1e-5), pieces.rms(x, w, 1e-5), dtype)
    close(kernels.rms(x, None, 1e-5), pieces.rms(x, None, 1e-5), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("more", [False, True])
def test_rms_backward_adds_to_the_sums(dtype, more):
    dy, x, w = random(7, 100, dtype=dtype), random(7, 100, dtype=dtype), random(100)
    extra = random(7, 100, dtype=dtype) if more else None
    sums = [ops.norm_sums(100, torch.device(DEVICE)) for ops in (kernels, pieces)]
    for _ in range(2):
        found = kernels.rms_backward(dy, x, w, 1e-5, sums[0], extra)
        wanted = pieces.rms_backward(dy, x, w, 1e-5, sums[1], extra)
    for f, g in zip(found, wanted, strict=True):
        close(f, g, dtype)
    close(sums[0].sum(0), sums[1].sum(0), torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_swiglu(dtype):
    both = random(5, 2 * 1100, dtype=dtype)
    close(kernels.swiglu(both), pieces.swiglu(both), dtype)
    dout, other = random(5, 1100, dtype=dtype), both.clone()
    close(kernels.swiglu_backward(dout, both), pieces.swiglu_backward(dout, other), dtype)
    close(both, other, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "partial"), [(16, 1.0), (24, 1.0), (16, 0.5), (80, 0.4)])
def test_turned(dtype, width, partial):
    turns = frequencies(width, Rope(10000.0, (), partial), 64).at(torch.arange(64))
    table = torch.stack(list(turns))[:, :, 0].contiguous().to(DEVICE)
    rows = random(6, 8 * width, dtype=dtype)
    half, other = rows[:, width : 7 * width].unflatten(1, (6, width)), random(9, 6, width, dtype=dtype)
    at, pos = torch.tensor([0, 8, 3, 3, 1, 7], device=DEVICE), torch.arange(6, device=DEVICE) * 7
    outs = [torch.empty(6, 6, width, dtype=dtype, device=DEVICE) for _ in range(2)]
    for ops, out in zip((kernels, pieces), outs, strict=True):
        ops.turned(half, other, at, pos, 3, table, 4, out)
    close(*outs, dtype)
    backs = [torch.zeros(6, 10, width, dtype=dtype, device=DEVICE) for _ in range(2)]
    for ops, back in zip((kernels, pieces), backs, strict=True):
        ops.turned_backward(outs[0], pos, 3, table, 4, back[:, 2:8])
    close(*backs, dtype)
    if dtype == torch.float32:  # turned back, it is the sum again
        torch.testing.assert_close(backs[0][:, 2:8], half + other[at], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 16), (9, 3, 24), (4, 4, 32)])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_merge_and_its_way_back(dtype, heads, key_heads, width, k):
    steps, rows = 4, 7
    q, dout = random(steps, rows, heads, width, dtype=dtype), random(steps, rows, heads, width, dtype=dtype)
    own = random(steps - 1, rows, 2 * key_heads, width, dtype=dtype)
    first, lse, dq = (
        random(rows, heads, width, dtype=dtype),
        random(heads, rows),
        random(rows, heads, width, dtype=dtype),
    )
    out, all_lse = kernels.merge(first, lse, q[k], own, k, 0.2)
    wanted, wanted_lse = pieces.merge(first, lse, q[k], own, k, 0.2)
    close(out, wanted, dtype)
    close(all_lse, wanted_lse, torch.float32)
    shares = [torch.zeros(steps, 2, steps - 1, rows, heads, device=DEVICE) for _ in range(2)]
    found = [
        ops.merge_backward(dout[k], out, all_lse, q[k], own, k, 0.2, dq, s[k])
        for ops, s in zip((kernels, pieces), shares, strict=True)
    ]
    close(*found, dtype)
    if k:
        close(*shares, torch.float32)
    for s in shares:
        s.copy_(random(*s.shape))
    shares[1].copy_(shares[0])
    found = [
        ops.own_backward(dout, q, s, max(k, 1), 0.2, key_heads)
        for ops, s in zip((kernels, pieces), shares, strict=True)
    ]
    close(*found, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("width", [64, 5000])
def test_loss(dtype, kind, width):
    draft, logits = 3 * random(6, width, dtype=dtype), 3 * random(5, width, dtype=dtype)
    (target, certainty), (wanted_target, wanted_certainty) = (
        ops.distribution(logits.clone()) for ops in (kernels, pieces)
    )
    close(target, wanted_target, dtype)
    close(certainty, wanted_certainty, dtype)
    at = torch.tensor([0, 4, 2, 2, 1, 3], device=DEVICE)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.1, 0.0], device=DEVICE)
    wanted = torch.full((5,), -1, device=DEVICE)
    wanted[4], wanted[0], wanted[2] = draft[1].argmax(), draft[0].argmin(), draft[2].argmax()
    other = draft.clone()
    sums = [torch.full((2, 6), float("nan"), device=DEVICE) for _ in range(2)]
    kernels.loss(draft, target, certainty, at, weight, wanted, kind, *sums[0])
    pieces.loss(other, target.float(), certainty, at, weight, wanted, kind, *sums[1])
    close(draft, other, dtype)
    close(sums[0][0], sums[1][0], torch.float32)
    assert sums[0][1].tolist() == sums[1][1].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("placed", [False, True])
def test_add_rows(dtype, placed):
    total, x = random(9, 1500, dtype=dtype), random(6, 2000, dtype=dtype)[:, 400:1300]
    at = torch.tensor([3, 8, 0, 1, 7, 4], device=DEVICE) if placed else None
    other = total.clone()
    kernels.add_rows(total[: None if placed else 6, 100:1000], x, at)
    pieces.add_rows(other[: None if placed else 6, 100:1000], x, at)
    close(total, other, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_fold_and_unfold(dtype):
    wide, scale = random(70, 1600), random(1500)
    weight, grads = wide[:, 50:1550], [random(70, 1600)] * 2
    grads[1] = grads[0].clone()
    for with_scale in (scale, None):
        outs = [torch.empty(70, 1500, dtype=dtype, device=DEVICE) for _ in range(2)]
        for ops, out in zip((kernels, pieces), outs, strict=True):
            ops.fold(out, weight, with_scale)
        close(*outs, dtype)
    sums = [torch.ones(1500, device=DEVICE) for _ in range(2)]
    for ops, grad, s in zip((kernels, pieces), grads, sums, strict=True):
        ops.unfold(grad[:, 50:1550], weight, scale, s)
    torch.testing.assert_close(*grads)
    close(*sums, torch.float32)
