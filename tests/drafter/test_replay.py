"""The walk by hand, and the parallel chains against a drafter that is run one token at a time."""

import pytest
import torch

from eyas.drafter import replay
from eyas.drafter.replay import Walk, walk
from tests.conftest import drafter, random_row
from tests.drafter.reference import Reference


def test_the_walk_jumps_over_what_was_accepted():
    """accepted 2 at 0 -> jump to 3; accepted 0 -> 4; accepted 1 of the last token -> end."""
    assert walk([2, 1, 0, 0, 1], k=3) == Walk(steps=3, accepted_at=(2, 1, 0))


def test_a_smaller_k_cuts_the_chain_and_walks_elsewhere():
    assert walk([2, 1, 0, 0, 1], k=1) == Walk(steps=4, accepted_at=(2,))  # 0 -> 2 -> 3 -> 4
    assert walk([3, 0, 0, 0], k=3) == Walk(steps=1, accepted_at=(1, 1, 1))


def test_steps_are_counted_where_their_context_lies():
    """Prompt of 254 tokens: steps at 255 (0 drafts right), 256 (2 right), 259 and 260 tokens of context."""
    assert list(replay.steps([0, 2, 0, 0, 1, 0], k=3)) == [(0, 0), (1, 2), (4, 1)]
    assert replay.by_context([0, 2, 0, 0, 0, 0], 254, k=3) == {
        (0, 256): Walk(1, (0, 0, 0)),
        (256, 512): Walk(3, (1, 1, 0)),
    }
    assert [replay.context_range(n) for n in (0, 255, 256, 511, 512, 8191, 8192)] == [
        (0, 256), (0, 256), (256, 512), (256, 512), (512, 1024), (4096, 8192), (8192, 16384),
    ]  # fmt: skip


def test_tau_counts_the_bonus_token_and_weighs_by_steps():
    walks = [Walk(4, (2, 1)), Walk(1, (1, 1))]
    assert replay.tau(walks) == 1 + 5 / 5
    assert replay.positions(walks) == [3 / 5, 2 / 5]
    assert walks[0].tau == 1 + 3 / 4


def test_the_interval_of_equal_conversations_is_a_point():
    interval = replay.tau_interval([Walk(4, (2, 1))] * 10, 0.95)
    assert interval == (1.75, 1.75, 1.75)


def test_the_interval_widens_with_spread_and_holds_the_value():
    interval = replay.tau_interval([Walk(4, (4,)), Walk(4, (0,))] * 8, 0.95)
    assert interval.low < interval.value == 1.5 < interval.high


@pytest.mark.parametrize("k", [1, 2, 4])
def test_parallel_chains_equal_one_token_at_a_time(k):
    made = drafter(seed=3)
    embedding = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
    kept = made.kept_W
    rows = []
    for seed in range(4):  # write the answer that the drafter itself would draft, then break it in places
        row = random_row(14, 4, seed)
        for t in range(3, 12):
            drafted = Reference(made, embedding, row).run(1, lambda logits: int(kept[logits.argmax()]))
            row.ids_T[t + 2] = drafted[t, 0][2] if t % 4 else 39
        rows.append(row)
    expected = []
    for row in rows:
        chains = Reference(made, embedding, row).run(k, lambda logits: int(kept[logits.argmax()]))
        accepted = []
        for t in range(row.start - 1, len(row) - 2):
            n = 0
            while n < k and (t, n) in chains and chains[t, n][2] == int(row.ids_T[t + 2 + n]):
                n += 1
            accepted.append(n)
        expected.append(accepted)
    found = replay.accepted_lengths(made, embedding, rows, k)
    assert found == expected
    assert max(map(max, found)) >= min(k, 2), "the example must accept something, or it shows nothing"
