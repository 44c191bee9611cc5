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


def ahead(
    items: Iterable[T], make: Callable[[T], U], tensors: Callable[[U], Iterable[Tensor]] | None = None
) -> Iterator[U]:
    """make(item) of each item in order, up to two of them prepared on a thread. What make raises is raised here.

    tensors: those that make puts on a GPU. They are then made on a stream of their own, beside the work that is in hand, and the
    current stream waits for them.
    """
    stream = torch.cuda.Stream() if tensors else None

    def made(item: T) -> tuple[U, torch.cuda.Event | None]:
        if stream is None:
            return make(item), None
        with torch.cuda.stream(stream):
            return make(item), stream.record_event()

    def ready(work: Future[tuple[U, torch.cuda.Event | None]]) -> U:
        value, event = work.result()
        if event and tensors:
            here = torch.cuda.current_stream()
            here.wait_event(event)
            for t in tensors(
                value
            ):  # whose memory the other stream may take again only when this one is done with it
                t.record_stream(here)
        return value

    with ThreadPoolExecutor(1) as pool:
        waiting: deque[Future[tuple[U, torch.cuda.Event | None]]] = deque()
        for item in items:
            waiting.append(pool.submit(made, item))
            if len(waiting) > DEPTH:
                yield ready(waiting.popleft())
        while waiting:
            yield ready(waiting.popleft())


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
