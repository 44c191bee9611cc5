import math

import torch

from eyas.drafter.batch import pack
from eyas.drafter.loss import Teacher, divergence, teacher_logits, ttt_loss
from eyas.drafter.network import unroll
from tests.conftest import contract, drafter, random_row


def teacher(made, outside=()):
    g = torch.Generator().manual_seed(1)
    c = made.contract
    draft_id = torch.full((c.vocab,), -1)
    draft_id[made.kept_W] = torch.arange(c.draft_vocab)
    draft_id[list(outside)] = -1
    return Teacher(
        torch.randn(c.draft_vocab, c.hidden, generator=g), torch.rand(c.hidden, generator=g) + 0.5, 1e-5, draft_id,
        torch.randn(c.vocab, c.hidden, generator=g),
    )  # fmt: skip


def test_divergence_by_hand():
    """Target 3/4, 1/4 against drafter 1/2, 1/2: 3/4 log(3/2) + 1/4 log(1/2)."""
    found = divergence(torch.tensor([[math.log(3), 0.0]]).log_softmax(-1), torch.tensor([[5.0, 5.0]]))
    assert abs(float(found) - (0.75 * math.log(1.5) + 0.25 * math.log(0.5))) < 1e-6


def test_the_final_norm_is_applied_to_the_last_state():
    t = Teacher(torch.eye(2), torch.tensor([1.0, 2.0]), 0.0, torch.empty(0), torch.empty(0))
    found = teacher_logits(t, torch.tensor([[3.0, 4.0]]))
    rms = math.sqrt((9 + 16) / 2)
    torch.testing.assert_close(found, torch.tensor([[3 / rms, 8 / rms]]))


def test_total_is_the_decayed_sum_over_supervised_pairs_inside_the_vocabulary():
    made = drafter()
    rows = [random_row(9, 3, 1), random_row(8, 4, 2)]
    t = teacher(made)
    batch = pack(rows)
    with torch.no_grad():
        found = ttt_loss(made, t, batch, steps=3, decay=0.5)
        expected, hits, pairs = 0.0, [0] * 3, [0] * 3
        for step in unroll(made, t.embedding_VD, batch, 3):
            logits = made.logits(step.h)
            for i, m in enumerate(step.live.tolist()):
                wanted = int(t.draft_id_V[batch.top1_M[m + step.k]])
                pairs[step.k] += 1
                if wanted < 0:
                    continue
                target = teacher_logits(t, batch.last_MD[m + step.k][None])
                expected += 0.5**step.k * float(divergence(target.log_softmax(-1), logits[i][None]))
                hits[step.k] += int(logits[i].argmax()) == wanted
    assert abs(float(found.total) - expected) < 1e-3 * expected
    assert (found.hits_K.tolist(), found.pairs) == (hits, pairs)
    assert any(int(t.draft_id_V[x]) < 0 for x in batch.top1_M), (
        "the example must hold a position outside the vocabulary"
    )


def test_positions_outside_the_vocabulary_give_no_loss_but_are_counted():
    made = drafter()
    rows = [random_row(9, 3, 1)]
    none = teacher(made, outside=range(contract().vocab))
    found = ttt_loss(made, none, pack(rows), steps=2, decay=0.8)
    assert float(found.total.detach()) == 0.0
    assert found.pairs == [5, 4] and found.hits_K.tolist() == [0, 0]


def test_gradients_reach_every_weight():
    made = drafter()
    for p in made.parameters():
        p.requires_grad_(True)
    ttt_loss(made, teacher(made), pack([random_row(20, 3, 1)]), 3, 0.8).total.backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in made.parameters())
