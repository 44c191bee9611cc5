"""Ctrl-C: once stops at the next safe place (a part, a shard, a step is finished and kept), twice stops at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from eyas.progress import say

_asked = threading.Event()


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """While active, the first SIGINT is only noted; the second raises KeyboardInterrupt wherever the program is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if _asked.is_set():
            raise KeyboardInterrupt
        _asked.set()
        say("\nstopping as soon as what is in hand is finished and kept; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, handler)
    _asked.clear()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _asked.clear()


def asked() -> bool:
    """Whether the user has asked to stop."""
    return _asked.is_set()


def safe_place() -> None:
    """Called where everything finished is on disk. Raises KeyboardInterrupt when the user has asked to stop."""
    if _asked.is_set():
        raise KeyboardInterrupt
