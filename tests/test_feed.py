import threading
import time

import pytest
import torch

from eyas.feed import DEPTH, Later, ahead


def test_items_come_in_order_and_at_most_two_are_prepared_ahead():
    made = []

    def make(i):
        made.append((i, threading.current_thread() is threading.main_thread()))
        return i * i

    stream = ahead(range(8), make)
    assert next(stream) == 0
    deadline = time.monotonic() + 20
    while len(made) < 1 + DEPTH and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(made) == 1 + DEPTH
    assert list(stream) == [i * i for i in range(1, 8)]
    assert made == [(i, False) for i in range(8)]


def test_what_make_raises_is_raised_at_its_item():
    def make(i):
        if i == 2:
            raise OSError("the shard is gone")
        return i

    stream = ahead(range(5), make)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(OSError, match="shard is gone"):
        next(stream)


def test_figures_are_read_as_they_were():
    one, two = Later(torch.tensor([1.5, 2.0]), torch.tensor(3)).read()
    assert one.tolist() == [1.5, 2.0] and int(two) == 3
