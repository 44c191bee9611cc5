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


def test_pick_finds_the_same_token_in_a_vocabulary_of_many_blocks():
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(64, 1000, generator=g) * (torch.rand(64, 1000, generator=g) < 0.05)
    probs = probs / probs.sum(-1, keepdim=True)
    uniform = torch.rand(64, generator=g)
    cumulative = probs.double().cumsum(-1)
    wanted = (cumulative > (uniform.double() * cumulative[:, -1])[:, None]).int().argmax(-1)
    found = pick(probs, uniform)
    assert (found == wanted).float().mean() > 0.98  # a point at a boundary may fall to the neighbour
    assert (probs[torch.arange(64), found] > 0).all()
    last = pick(probs, torch.full((64,), 1.0))  # beyond the largest double below 1: still a possible token
    assert (probs[torch.arange(64), last] > 0).all()


def test_a_rows_numbers_depend_on_the_row_alone():
    assert np.array_equal(row_uniforms("0123456789abcdef", 4), row_uniforms("0123456789abcdef", 9)[:4])
    assert not np.array_equal(row_uniforms("0123456789abcdef", 4), row_uniforms("0123456789abcdee", 4))
