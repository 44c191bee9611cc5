"""Golden numbers for the supervised pairs: prompt a b c, completion d e f g."""

import pytest
import torch

from eyas.drafter.batch import pack, usable
from eyas.stores.states import RowStates

A, B, C, D, E, F, G = range(10, 17)


def row(start=3):
    ids = torch.tensor([A, B, C, D, E, F, G], dtype=torch.int32)
    position = torch.arange(7.0)
    return RowStates(
        "0", ids, position[:, None, None].expand(7, 1, 2), position[:, None].expand(7, 2), ids + 100, start
    )


def test_keys_are_all_positions_that_a_live_query_can_see():
    batch = pack([row()])
    assert batch.key_pos_K.tolist() == [0, 1, 2, 3, 4]
    assert batch.key_token_K.tolist() == [B, C, D, E, F]  # x[t+1]
    assert batch.key_aux_KLD[:, 0, 0].tolist() == [0, 1, 2, 3, 4]  # g[t]


def test_live_positions_start_before_the_first_sampled_token_and_end_three_before_the_end():
    batch = pack([row()])
    assert batch.key_pos_K[batch.query_key_M].tolist() == [2, 3, 4]  # t = s-1 … e-3
    assert batch.token_M.tolist() == [D, E, F]
    assert batch.truth_M.tolist() == [E, F, G]
    assert batch.last_MD[:, 0].tolist() == [3, 4, 5]  # y[t+1]
    assert batch.top1_M.tolist() == [D + 100, E + 100, F + 100]


def test_step_k_of_position_m_reads_index_m_plus_k():
    batch = pack([row()])
    assert [x.tolist() for x in batch.live] == [[0, 1, 2], [0, 1], [0]]
    assert [x.tolist() for x in batch.stays] == [[0, 1, 2], [0, 1], [0]]
    pairs = sorted((m, k) for k, live in enumerate(batch.live) for m in live.tolist())
    read = [(batch.token_M[m + k].item(), batch.truth_M[m + k].item()) for m, k in pairs]
    assert read == [(D, E), (E, F), (F, G), (E, F), (F, G), (F, G)]


def test_two_rows_keep_their_own_positions():
    batch = pack([row(), row(start=5)])
    assert batch.row_starts == (0, 3, 4)
    assert batch.key_pos_K.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.query_key_M.tolist() == [2, 3, 4, 9]
    assert batch.queries == 3 and batch.grid_M.tolist() == [0, 1, 2, 3]
    assert batch.keys == 5 and batch.key_grid_K.tolist() == [*range(10)]
    assert [x.tolist() for x in batch.live] == [[0, 1, 2, 3], [0, 1], [0]]
    assert [x.tolist() for x in batch.stays] == [[0, 1, 2, 3], [0, 1], [0]]
    assert batch.first_B.tolist() == [2, 4]


def test_sizes_are_rounded_up_by_a_row_that_lives_at_no_step_and_rows_of_no_length():
    batch = pack([row(), row(start=5)], multiple=8)
    assert len(batch.key_pos_K) == 16 and len(batch.query_key_M) == 8 and len(batch.first_B) == 16
    assert batch.key_bounds_B[:4].tolist() == [0, 5, 10, 16] and batch.query_bounds_B[:4].tolist() == [
        0,
        3,
        4,
        8,
    ]
    assert set(batch.key_bounds_B[3:].tolist()) == {16} and set(batch.query_bounds_B[3:].tolist()) == {8}
    assert batch.query_key_M.tolist() == [
        2,
        3,
        4,
        9,
        12,
        13,
        14,
        15,
    ]  # the last queries see all keys of their row
    assert batch.queries == 8 and batch.keys == 8
    assert batch.steps_M.tolist() == [3, 2, 1, 1, 0, 0, 0, 0]
    assert batch.pairs == 4 and batch.pairs_S == pack([row(), row(start=5)]).pairs_S


def test_a_completion_of_one_token_has_no_pair_and_is_refused():
    assert not usable(row(start=6))
    assert usable(row(start=5))
    with pytest.raises(ValueError, match="no supervised pair"):
        pack([row(start=6)])
