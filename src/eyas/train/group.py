"""Several processes that train one drafter: each takes a part of every optimizer step, and all hold the same weights.

    torchrun --nproc-per-node 2 -m -- eyas train RECIPE [--run DIR]

The first process alone writes the run folder and speaks. A step's rows are dealt out by length, gradients and figures are summed once a
step, and held-out rows are dealt out too, so that nobody waits for one that works alone.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eyas import progress
from eyas.errors import ContractError, EyasError, SurroundingsError, UsageError

T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # a process may read its states for long; one that ends is noticed at once


class Group:
    """This process among `world`; alone unless it was launched by torchrun."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world, self.begun = rank, world, False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def begin(self, training: bool = True) -> bool:
        """Whether there is something to train: the first process says so once it has looked, the others wait for that."""
        self.begun = True
        return self.gather(training)[0]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over the processes, in place."""
        if self.world > 1:
            with _others():
                for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
                    work.wait()

    def gather(self, value: T) -> list[T]:
        """Every process's value, in their order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with _others():
            dist.all_gather_object(found, value)
        return found

    def deal(self, items: Sequence[T]) -> list[T]:
        """This process's part of the items."""
        return list(items[self.rank :: self.world])

    def collect(self, mine: list[T]) -> list[T]:
        """What every process made of its part, in the order of the items that were dealt."""
        parts = self.gather(mine)
        return [parts[i % self.world][i // self.world] for i in range(sum(map(len, parts)))]

    def agree(self, facts: dict[str, Any]) -> None:
        """Raises ContractError, in every process, where one found something else."""
        found = self.gather(facts)
        for name, mine in found[0].items():
            for rank, other in enumerate(found):
                if other[name] != mine:
                    raise ContractError(
                        f"process {rank} of {self.world} has other {name} ({other[name]}) than process 0 ({mine}). All machines need the same "
                        "recipe, target and run folder."
                    )


_current = Group()


def current() -> Group:
    return _current


@contextlib.contextmanager
def _others() -> Iterator[None]:
    try:
        yield
    except dist.DistError as e:
        raise SurroundingsError(_lost(e)) from e
    except RuntimeError as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        raise SurroundingsError(_lost(e)) from e


def _lost(e: Exception) -> str:
    return (
        f"another process of this training ended or cannot be reached ({' '.join(str(e).split())[:160]}). Its own message says why; the "
        "last good state is kept."
    )


@contextlib.contextmanager
def joined(verb: str) -> Iterator[Group]:
    """The group that torchrun launched, or this process alone. Raises UsageError for any verb but train."""
    global _current
    if not dist.is_torchelastic_launched():
        yield _current
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if verb != "train":
        raise UsageError(f"eyas {verb} works in one process; only `eyas train` can be launched by torchrun.")
    if rank:
        progress.silence()
    cuda = torch.cuda.is_available()
    if cuda:
        if (local := int(os.environ["LOCAL_RANK"])) >= torch.cuda.device_count():
            raise UsageError(
                f"process {local} has no GPU: this machine has {torch.cuda.device_count()}, and each process needs its own. Launch as many "
                "as there are GPUs (torchrun --nproc-per-node)."
            )
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    _current = Group(rank, world)
    try:
        yield _current
        if not _current.begun:  # nothing to train: the others wait for that
            _current.begin(False)
    except EyasError as e:
        if rank:
            raise type(e)(f"process {rank} of {world}: {e}") from e
        raise
    dist.destroy_process_group()
