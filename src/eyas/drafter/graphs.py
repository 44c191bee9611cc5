"""A batch's work as one CUDA graph: for shapes so small that a host takes longer to launch their kernels than a GPU to run them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.batch import Batch

SMALL = 2**38  # multiplications of a draft step's way forward; with more, kernels outlast launches
LIMIT = 128  # graphs
SHAPES = 4  # of their inputs, as a rule

Work = Callable[[Batch, Tensor, int], tuple[Tensor, ...]]


def suits(live: int, weights: int) -> bool:
    """Whether a batch of so many live positions is better replayed, through matrices of so many weights."""
    return live * weights <= SMALL


class Graphs:
    """Calls work(batch, share, steps): launched as it is when a batch has a new shape, captured at the second batch of this shape, and replayed
    from then on. Its results hold until the next call. Beyond LIMIT shapes, the others are launched as they are.

    Work must read tensors of these two alone and such that stay where they are, wait for nothing, and return tensors.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()
        self.graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.inputs: dict[tuple[int, torch.Size], Tensor] = {}
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(
        self, work: Work, batch: Batch, share: Tensor, steps: int, begun: bool
    ) -> tuple[Tensor, ...]:
        """begun: any other thing that decides what work launches."""
        given = [share, *batch.tensors()]
        key = (steps, begun, batch.queries, batch.keys, *(t.shape for t in given))
        if key not in self.seen or (key not in self.graphs and len(self.graphs) >= LIMIT):
            self.seen.add(key)
            return work(batch, share, steps)
        own = [self.inputs.setdefault((i, t.shape), torch.empty_like(t)) for i, t in enumerate(given)]
        for to, t in zip(own, given, strict=True):
            to.copy_(t)
        if key not in self.graphs:
            self.graphs[key] = self._capture(work, batch, own, steps)
        graph, results = self.graphs[key]
        graph.replay()
        return results

    def _capture(
        self, work: Work, batch: Batch, own: list[Tensor], steps: int
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        held, graph = batch.with_tensors(own[1:]), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # batches are moved to the GPU on another thread meanwhile, which a capture of every thread would forbid
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = work(held, own[0], steps)
            finally:
                graph.capture_end()
        return graph, results
