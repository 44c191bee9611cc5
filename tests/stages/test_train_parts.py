import torch

from eyas.train import schedule, vocabulary


def test_the_vocabulary_keeps_the_most_frequent_and_always_the_special_ids():
    answers = [torch.tensor([5, 5, 5, 7, 7, 9])]
    found = vocabulary.choose(answers, [torch.tensor([2, 2, 1])], always={0}, size=3, vocab=12)
    assert found.kept_W.tolist() == [0, 5, 7]
    assert (found.coverage, found.distinct, found.filled) == (5 / 6, 3, 1)


def test_places_left_go_to_prompt_tokens_then_to_the_lowest_ids():
    found = vocabulary.choose([torch.tensor([9])], [torch.tensor([8, 8, 6])], always=set(), size=5, vocab=12)
    assert found.kept_W.tolist() == [0, 1, 6, 8, 9]
    assert found.filled == 4 and found.coverage == 1.0


def test_the_whole_vocabulary_when_it_fits():
    found = vocabulary.choose([torch.tensor([3])], [], always=set(), size=99, vocab=6)
    assert found.kept_W.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_epochs_steps_hold_every_row_once_and_do_not_exceed_the_limit():
    lengths = [10, 20, 30, 15, 5, 40]
    steps = schedule.epoch_steps(lengths, 45, seed=1, epoch=0)
    assert sorted(i for s in steps for i in s) == list(range(6))
    assert all(sum(lengths[i] for i in s) <= 45 for s in steps)
    assert steps == schedule.epoch_steps(lengths, 45, 1, 0) != schedule.epoch_steps(lengths, 45, 1, 1)


def test_a_row_longer_than_a_step_has_its_own():
    steps = schedule.epoch_steps([100, 10], 50, 0, 0)
    assert sorted(steps) == [[0], [1]]


def test_micro_batches_hold_similar_lengths_longest_first():
    assert schedule.micro_batches([0, 1, 2, 3], [10, 40, 12, 38], 80) == [[1, 3], [2, 0]]


def test_the_rate_warms_up_and_falls_to_its_floor():
    rates = [schedule.learning_rate(s, 100, 1.0) for s in range(100)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[5] == 1.0 and all(a >= b for a, b in zip(rates[5:], rates[6:], strict=False))
    assert 0.02 <= rates[-1] < 0.025
