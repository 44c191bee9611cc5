"""The batched, packed network against the reference, for every norm variant."""

import itertools

import pytest
import torch

from eyas.contract import Norms
from eyas.drafter.batch import pack
from eyas.drafter.network import unroll
from tests.conftest import drafter, random_row
from tests.drafter.reference import Reference

VARIANTS = [
    Norms(b, fc, o)
    for b, fc, o in itertools.product((False, True), ("none", "chunks", "whole"), (False, True))
] + [Norms(False, "chunks", True, qk=True)]


def rows():
    return [random_row(11, 4, 1), random_row(7, 5, 2), random_row(12, 1, 3)]


def row_of(batch, m):
    return sum(m >= first for first in batch.row_starts[1:])


@pytest.mark.parametrize("norms", VARIANTS, ids=str)
def test_unrolled_steps_equal_the_reference(norms):
    made = drafter(norms=norms)
    embedding = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
    batch = pack(rows())
    expected = [Reference(made, embedding, row).run(4) for row in rows()]
    seen = 0
    with torch.no_grad():
        for step in unroll(made, embedding, batch, 4):
            logits = made.logits(step.h)
            for i, m in enumerate(step.live.tolist()):
                b = row_of(batch, m)
                t = rows()[b].start - 1 + m - batch.row_starts[b]
                h, wanted, _ = expected[b][t, step.k]
                torch.testing.assert_close(step.h[i], h, rtol=2e-3, atol=2e-4)
                torch.testing.assert_close(logits[i], wanted, rtol=2e-3, atol=2e-4)
                seen += 1
    assert seen == sum(len(e) for e in expected)


def test_drafting_steps_read_their_own_proposals():
    made = drafter()
    embedding = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
    kept = made.kept_W
    batch = pack(rows())
    expected = [
        Reference(made, embedding, r).run(4, lambda logits: int(kept[logits.argmax()])) for r in rows()
    ]
    seen = {}

    def choose(step):
        tokens = kept[made.logits(step.h).argmax(-1)]
        for m, token in zip(step.live.tolist(), tokens.tolist(), strict=True):
            seen[m, step.k] = token
        return tokens

    with torch.no_grad():
        for _ in unroll(made, embedding, batch, 4, choose):
            pass
    for (m, k), token in seen.items():
        b = row_of(batch, m)
        t = rows()[b].start - 1 + m - batch.row_starts[b]
        assert token == expected[b][t, k][2]
    assert len(seen) == sum(len(e) for e in expected)


def test_rows_packed_together_do_not_see_each_other():
    made = drafter()
    embedding = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        together = [s.h for s in unroll(made, embedding, pack(rows()), 3)]
        alone = [[s.h for s in unroll(made, embedding, pack([r]), 3)] for r in rows()]
    for k in range(3):
        torch.testing.assert_close(
            together[k], torch.cat([a[k] for a in alone if len(a) > k]), rtol=2e-3, atol=2e-4
        )


def test_d2t_holds_offsets():
    made = drafter()
    made.d2t_W.zero_()
    made.d2t_W[5:] = 7
    assert made.kept_W.tolist()[:8] == [0, 1, 2, 3, 4, 12, 13, 14]


def test_a_batch_packed_for_fewer_steps_is_refused():
    made = drafter()
    with pytest.raises(ValueError, match="packed for 2"):
        list(unroll(made, torch.randn(40, 16), pack(rows(), steps=2), 3))
