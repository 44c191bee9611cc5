"""Keeping a GPU busy: work prepared ahead on a thread, and results read after the next work was launched."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")
DEPTH = 2


def ahead(items: Iterable[T], make: Callable[[T], U]) -> Iterator[U]:
    """make(item) of each item in order, up to two of them prepared on a thread. What make raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[Future[U]] = deque()
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > DEPTH:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Later:
    """Tensors on their way from the device; `read` waits for them, and not for what was launched after them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._event = torch.cuda.Event() if tensors[0].is_cuda else None
        self._host = [t.to("cpu", non_blocking=True) for t in tensors]
        if self._event:
            self._event.record()

    def read(self) -> list[Tensor]:
        if self._event:
            self._event.synchronize()
        return self._host
