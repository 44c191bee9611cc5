"""What training runs against its specification: eyas.drafter.loss through autograd, for random shapes, rows, norms and losses."""

import dataclasses
import gc
import random
import weakref
from typing import NamedTuple

import pytest
import torch

from eyas.contract import Norms
from eyas.drafter import gradients, kernels
from eyas.drafter.batch import pack
from eyas.drafter.gradients import Gradients
from eyas.drafter.loss import Loss, Teacher, ttt_loss
from eyas.drafter.network import Drafter
from eyas.stores.states import RowStates
from tests.conftest import contract

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]

WIDE = {
    "hidden": 256, "mlp": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "vocab": 2000, "draft_vocab": 1000,
}  # fmt: skip
NORMS = [
    Norms(False, "none", False),
    Norms(True, "chunks", False),
    Norms(False, "whole", True),
    Norms(True, "none", True),
    Norms(False, "chunks", True, qk=True),
]


def made_up(norms, chance, **extra):
    c = dataclasses.replace(contract(), norms=norms, **extra)
    torch.manual_seed(chance.randrange(10**6))
    made = Drafter(c)
    kept = torch.randperm(c.vocab)[: c.draft_vocab].sort().values
    head = lambda: 2 * torch.randn(c.draft_vocab, c.hidden) / c.hidden**0.5  # noqa: E731
    made.reset(chance.randrange(99), kept, head(), 1 + 0.2 * torch.randn(c.hidden))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name != "lm_head.weight":
                p.copy_(
                    1 + 0.2 * torch.randn(p.shape)
                    if p.dim() == 1
                    else torch.randn(p.shape) / p.shape[1] ** 0.5
                )
    draft_id = torch.full((c.vocab,), -1)
    draft_id[kept] = torch.arange(c.draft_vocab)
    teacher = Teacher(head(), torch.rand(c.hidden) + 0.5, 1e-5, draft_id, torch.randn(c.vocab, c.hidden))
    return made, teacher


def rows_of(chance, made, count, longest=40):
    out = []
    for i in range(count):
        length = chance.randrange(4, longest)
        start, c = chance.randrange(1, length - 1), made.contract
        g = torch.Generator().manual_seed(i + chance.randrange(10**6))
        ids = lambda: torch.randint(c.vocab, (length,), generator=g, dtype=torch.int32)  # noqa: B023, E731
        new = lambda *shape: torch.randn(*shape, generator=g)  # noqa: B023, E731
        out.append(RowStates(str(i), ids(), new(length, 3, c.hidden), new(length, c.hidden), ids(), start))
    return out


class Found(NamedTuple):
    losses: list[Loss]
    gradients: dict[str, torch.Tensor]

    def away_from(self, other):
        return max(
            float((g - other.gradients[n]).norm() / other.gradients[n].norm())
            for n, g in self.gradients.items()
        )


class Case:
    """A drafter, its teacher, and batches of random documents."""

    def __init__(self, norms, seed, steps=4, kind="kl", multiple=1, device="cpu", longest=40, **extra):
        chance = random.Random(seed)
        self.made, teacher = made_up(norms, chance, **extra)
        self.made.to(device)
        self.teacher = Teacher(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in teacher))
        sizes = (chance.randrange(1, 6), 2)
        rows = [rows_of(chance, self.made, n, longest) for n in sizes]
        self.batches = [pack(r, device, steps, multiple) for r in rows]
        self.pairs = sum(b.pairs for b in self.batches)
        self.steps, self.kind, self.device = steps, kind, device

    def specified(self, autocast=False):
        """By eyas.drafter.loss, through autograd."""
        self.made.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            losses = [ttt_loss(self.made, self.teacher, b, self.steps, 0.7, self.kind) for b in self.batches]
        (sum(x.total for x in losses) / self.pairs).backward()
        return Found(losses, {n: p.grad.clone() for n, p in self.made.named_parameters()})

    def run(self, dtype=torch.float32, rounds=1, replayed=True):
        """By what training runs, so many times over."""
        self.made.zero_grad()
        t = self.teacher
        teacher = t._replace(head_WD=t.head_WD.to(dtype), embedding_VD=t.embedding_VD.to(dtype))
        fast = Gradients(self.made, teacher, dtype, self.steps, 0.7, self.kind)
        fast.replay &= replayed
        for _ in range(rounds):
            fast.refresh()
            losses = [
                Loss(x.total.clone(), x.hits_K.clone(), x.pairs)
                for x in (fast.add(b, self.pairs) for b in self.batches)
            ]
            fast.finish()
        self.replayed = len(fast.graphs.graphs) if fast.replay else 0
        return Found(losses, {n: p.grad.clone() for n, p in self.made.named_parameters()})


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradients_equal_the_specification(norms, kind, seed):
    case = Case(norms, seed, kind=kind, multiple=(1, 16)[seed % 2])
    wanted, found = case.specified(), case.run()
    for w, f in zip(wanted.losses, found.losses, strict=True):
        torch.testing.assert_close(f.total, w.total.detach() / case.pairs, rtol=1e-4, atol=1e-6)
        assert f.hits_K.tolist() == w.hits_K.tolist() and f.pairs == w.pairs
    assert found.away_from(wanted) < 2e-4


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_as_near_to_float32_as_autocast_is(norms, kind, device):
    """Noise of bfloat16, and no more: the specification under autocast is the measure."""
    case = Case(
        norms, 8, kind=kind, device=device, multiple=64, longest=300 if device == "cuda" else 60, **WIDE
    )
    exact, noisy = case.specified(), case.specified(autocast=True)
    found = case.run(torch.bfloat16)
    for e, f in zip(exact.losses, found.losses, strict=True):
        torch.testing.assert_close(f.total, e.total.detach() / case.pairs, rtol=2e-2, atol=1e-3)
    more = {"kl": 1.3, "lk": 2.5}[kind]  # LK's gradient jumps where the two distributions cross
    assert found.away_from(exact) < more * noisy.away_from(exact) + 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("norms", NORMS)
def test_replayed_work_is_the_same_work(norms):
    case = Case(norms, 7, device="cuda", multiple=64, longest=300, **WIDE)
    launched = case.run(torch.bfloat16, replayed=False)
    assert not case.replayed
    found = case.run(torch.bfloat16, rounds=4)
    assert case.replayed == 2
    for w, f in zip(launched.losses, found.losses, strict=True):
        torch.testing.assert_close(f.total, w.total, rtol=1e-5, atol=1e-6)
        assert f.hits_K.tolist() == w.hits_K.tolist()
    assert found.away_from(launched) < 1e-3  # FlashAttention adds in no fixed order


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_dropped_is_freed_at_once(device):
    case = Case(NORMS[1], 5, device=device, multiple=64, **WIDE)
    t = case.teacher
    teacher = t._replace(head_WD=t.head_WD.bfloat16(), embedding_VD=t.embedding_VD.bfloat16())
    fast = Gradients(case.made, teacher, torch.bfloat16, case.steps, 0.7)
    for _ in range(2):
        fast.add(case.batches[0], case.pairs)
    gone = weakref.ref(fast)
    gc.disable()
    try:
        del fast
        assert gone() is None  # not only when Python looks for cycles: a GPU's memory is full before
    finally:
        gc.enable()


def test_a_batch_of_more_steps_than_training_asks_for_gives_the_same():
    case = Case(NORMS[1], 5, steps=6, longest=30)
    case.steps = 3
    wanted, found = case.specified(), case.run()
    assert [f.pairs for f in found.losses] == [w.pairs for w in wanted.losses]
    assert found.away_from(wanted) < 2e-4


def test_rows_of_a_step_beyond_the_batch_are_refused():
    case = Case(NORMS[0], 0, steps=2)
    case.steps = 3
    with pytest.raises(ValueError, match="3 draft steps of a batch that was packed for 2"):
        case.run()


@pytest.mark.parametrize("norms", NORMS[1:3])
def test_kernels_give_the_same_gradients(norms, monkeypatch):
    """All of a step through the GPU's kernels (in Triton's interpreter where there is none)."""
    monkeypatch.setattr(gradients, "ops_of", lambda device: kernels)
    case = Case(
        norms, 3, steps=3, multiple=8, longest=16, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    wanted, found = case.specified(), case.run()
    for w, f in zip(wanted.losses, found.losses, strict=True):
        assert f.hits_K.tolist() == w.hits_K.tolist()
    assert found.away_from(wanted) < 2e-4


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_that_only_emulates_bfloat16_multiplies_in_float32(native, dtype, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native
    )
    assert gradients.product_dtype("cuda", "bfloat16") == dtype
    assert gradients.product_dtype("cpu", "bfloat16") == torch.bfloat16
    assert gradients.product_dtype("cpu", "float32") == torch.float32
