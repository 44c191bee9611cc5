"""How much of a GPU's memory a training step takes: counted from the tensors that drafter/gradients.py keeps, before any is made.

weights    float32 parameters, gradients and both moments of AdamW; matrices again in the products' type; the target's embedding
           and the head rows of the draft vocabulary
batch      states and ids of a batch, and of those prepared ahead
kept       what the draft steps leave for the way back
working    the most that lives beside it: the target's distribution and a chunk of logits on the way forward, gradients of
           attention on the way back
"""

import math
from typing import NamedTuple

from eyas.contract import Contract
from eyas.drafter import graphs, shapes
from eyas.drafter.gradients import CHUNK_BYTES


class Memory(NamedTuple):
    """Bytes."""

    weights: int
    batch: int
    kept: int
    working: int

    @property
    def peak(self) -> int:
        return sum(self)


def of_training(c: Contract, keys: int, live: int, steps: int, batches: int, size: int = 2) -> Memory | None:
    """The peak of training with batches of `keys` step-0 keys and `live` positions, so many batches resident at once; size: bytes of
    one element of the products' type. None for latent attention, which autograd trains: nobody counted that. Batches small enough are replayed as graphs, which keeps a second set of what a batch needs."""
    if c.latent:
        return None
    wanted = {n: s for n, s in shapes.of_contract(c).items() if n not in ("d2t", "t2d")}
    parameters = sum(math.prod(s) for s in wanted.values())
    matrices = sum(math.prod(s) for s in wanted.values() if len(s) == 2)
    layers, wide, q, kv = len(c.aux_layers), c.hidden, c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    weights = parameters * 16 + matrices * size + (c.vocab + c.draft_vocab) * wide * size + c.vocab * 8
    batch = (keys * layers * wide + live * wide) * size + (3 * keys + 8 * live) * 8
    norm = (
        layers * wide if c.norms.fc != "none" else 0
    )  # made for the way forward, and again for the way back
    of_keys = keys * (norm + 3 * wide + 2 * kv) + live * (wide + q)
    fed = wide if c.norms.output else 0
    of_steps = live * (steps * (q + q + 3 * wide + 2 * c.mlp + fed) + wide + (steps - 1) * kv)
    if c.norms.qk:  # queries and keys as they were before their norms
        of_keys += keys * kv // 2
        of_steps += live * (steps * q + (steps - 1) * kv // 2)
    chunk = min(live * c.draft_vocab * size, CHUNK_BYTES)
    forward = live * (c.draft_vocab + 2 * wide) * size + chunk
    expanded = (
        2 * keys * q if c.heads != c.kv_heads else 0
    )  # FlashAttention's gradients of keys and values, head by head
    back = live * (steps * q + 3 * wide + 2 * q) * size + (keys * kv + expanded) * size
    back += 4 * (live * (q + kv) + keys * kv + live * q + steps * 2 * max(steps - 1, 1) * live * c.heads)
    kept, working = (of_keys + of_steps) * size, max(forward, back)
    if size == 2 and graphs.suits(live, matrices):  # replayed in memory of their own
        kept, working, batches = 2 * kept, 2 * working, batches + graphs.SHAPES
    return Memory(weights, batches * batch, kept, working)
