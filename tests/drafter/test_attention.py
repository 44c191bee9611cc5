import math

import torch

from eyas.contract import Rope
from eyas.drafter.attention import frequencies, rope, ttt_attention, visible


def test_a_query_sees_keys_up_to_its_own_place_in_its_row():
    mask = visible(5, 3, torch.tensor([1, 3]))[:, 0, 0]
    assert mask.int().tolist() == [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    ]


def test_own_keys_of_later_steps_join_the_softmax():
    """One query, one visible key of score 0 and value 1, one own key of score log 3 and value 2: (1 + 3*2) / 4."""
    query = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]])
    zero, one = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    own_key = torch.tensor([[[[math.log(3), 0.0, 0.0, 0.0]]]])
    out = ttt_attention(query, zero, one, [(own_key, 2 * one)], torch.ones(1, 1, 1, 1, 1, dtype=torch.bool))
    torch.testing.assert_close(out, torch.full((1, 1, 4), 7 / 4))


def test_rope_turns_halves_by_position():
    x = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    out = rope(x, frequencies(2, Rope(10000.0), 64).at(torch.tensor([0, 1])))
    torch.testing.assert_close(out[0, 0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(out[1, 0], torch.tensor([math.cos(1), math.sin(1)]))
