import numpy as np
import torch

from eyas.drafter.sampling import pick, probabilities, row_uniforms


def test_top_p_keeps_the_smallest_set_that_holds_it():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    torch.testing.assert_close(probabilities(logits, 1.0, 0.7), torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    torch.testing.assert_close(probabilities(logits, 1.0), torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def test_temperature_sharpens():
    probs = probabilities(torch.log(torch.tensor([[0.8, 0.2]])), 0.5)
    torch.testing.assert_close(probs, torch.tensor([[16 / 17, 1 / 17]]))


def test_pick_inverts_the_cumulative_distribution_and_skips_impossible_tokens():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75]]).expand(4, 4)
    assert pick(probs, torch.tensor([0.0, 0.2499, 0.25, 0.9999])).tolist() == [1, 1, 3, 3]


def test_a_rows_numbers_depend_on_the_row_alone():
    assert np.array_equal(row_uniforms("0123456789abcdef", 4), row_uniforms("0123456789abcdef", 9)[:4])
    assert not np.array_equal(row_uniforms("0123456789abcdef", 4), row_uniforms("0123456789abcdee", 4))
