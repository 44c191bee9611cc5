"""Rows packed for the drafter: which positions are keys, which are live queries, and where each pair finds its tokens.

A row of e tokens whose completion starts at s has (shared with facts of EAGLE-3; arXiv 2503.01840):

    position t        0 … s-2   s-1 … e-3      e-2  e-1
    step-0 key/value   yes       yes            no   no      (no live query comes after e-3)
    live query          no       yes            no   no      step k lives while t + 2 + k <= e - 1

Pair (t, k) reads token x[t+1+k], learns the target's distribution after position t+1+k, whose sample was x[t+2+k].
Live positions of all rows lie end to end (index m). Because k steps on from t are k places on in the same row,
pair (m, k) finds token, truth and teacher at index m + k of the same flat arrays.

Example, prompt [a b c], completion [d e f g] (s = 3, e = 7): live t = 2, 3, 4.
    m   t   token   truth   teacher   steps
    0   2   d       e       y[3]      3      (k = 0, 1, 2 read d e f and learn e f g)
    1   3   e       f       y[4]      2
    2   4   f       g       y[5]      1

K step-0 keys, M live positions, L aux layers, D target width, B rows, Q most live positions of a row, J most keys.

On a GPU K, M, B, Q and J are rounded up (`multiple`), so that shapes repeat from batch to batch: a row is added that lives at no step,
and then rows of no length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eyas.stores.states import RowRef, RowStates, unscaled

MAX_STEPS = 16
ROWS = 16  # B becomes a multiple of this where a row is added


@dataclass(frozen=True)
class Batch:
    """Flat tensors on one device, and the places in the padded grids that attention uses."""

    key_token_K: Tensor  # x[t+1] of each key
    key_aux_KLD: Tensor  # g[t] of each key
    key_pos_K: Tensor  # t, the rope position
    query_key_M: Tensor  # index of the live position among the keys
    token_M: Tensor  # x[t+1]
    truth_M: Tensor  # x[t+2]
    last_MD: Tensor  # y[t+1], before the final norm
    top1_M: Tensor  # the target's argmax after position t+1
    steps_M: Tensor  # at how many draft steps m lives, without a limit; 0 of the added row
    grid_M: Tensor  # place of m in the flattened query grid [B*Q]
    key_grid_K: Tensor  # place of a key in the flattened key grid [B*J]
    first_B: Tensor  # key number (in its row) of a row's first live position: s - 1
    query_bounds_B: Tensor  # [B+1] int32: first m of each row, and the end
    key_bounds_B: Tensor  # [B+1] int32: first key of each row, and the end
    steps: int  # how many draft steps the batch is for
    queries: int  # Q
    keys: int  # J
    row_starts: tuple[int, ...]  # first m of each row that was packed, and the end
    pairs_S: tuple[int, ...]  # [k]: live pairs at draft step k

    @property
    def pairs(self) -> int:
        """Live pairs at step 0, which is the number of supervised tokens."""
        return self.row_starts[-1]

    def tensors(self) -> list[Tensor]:
        return [x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)]

    def with_tensors(self, tensors: Iterable[Tensor]) -> "Batch":
        """The same batch, of these tensors in the order of `tensors`."""
        names = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        changed: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return replace(self, **changed)

    @cached_property
    def live(self) -> tuple[Tensor, ...]:
        """[k]: the positions m that live at draft step k; ends where nothing lives, or at `steps`."""
        return tuple((self.steps_M > k).nonzero()[:, 0] for k in range(len(self.pairs_S)))

    @cached_property
    def stays(self) -> tuple[Tensor, ...]:
        """[k]: where in live[k-1] those of live[k] stand."""
        gone = [(self.steps_M[now] > k + 1).nonzero()[:, 0] for k, now in enumerate(self.live[:-1])]
        return (self.live[0], *gone)


def usable(row: RowStates | RowRef) -> bool:
    """Whether a row has any pair: a completion of at least two tokens after at least one prompt token."""
    return row.start >= 1 and len(row) - row.start >= 2


def pack(
    rows: Sequence[RowStates], device: torch.device | str = "cpu", steps: int = MAX_STEPS, multiple: int = 1
) -> Batch:
    """Pack usable rows end to end for up to `steps` draft steps, and round K, M, Q and J up to a multiple. All index arithmetic is
    done on the CPU and moved at once: nothing here waits for a GPU. Raises ValueError for a row that is not usable.
    """
    for row in rows:
        if not usable(row):
            raise ValueError(f"row {row.row_id} has no supervised pair")
    start_B = torch.tensor([r.start for r in rows])
    keys_B = torch.tensor([len(r) for r in rows]) - 2
    lives_B = keys_B + 1 - start_B
    row_starts = (0, *lives_B.cumsum(0).tolist())
    pairs_S = tuple(int((lives_B - k).clamp_min(0).sum()) for k in range(min(steps, int(lives_B.max()))))
    more_K, more_M = _more(int(keys_B.sum()), row_starts[-1], multiple)
    if more_K:
        empty = (0,) * (-(len(rows) + 1) % ROWS)
        keys_B, lives_B = torch.tensor(
            [[*keys_B.tolist(), more_K, *empty], [*lives_B.tolist(), more_M, *empty]]
        )
    row_K, place_K = _enumerate(keys_B)
    row_M, place_M = _enumerate(lives_B)
    key0_B, first_B = keys_B.cumsum(0) - keys_B, keys_B - lives_B
    queries, keys = (_rounded(int(x.max()), multiple) for x in (lives_B, keys_B))
    steps_M = lives_B[row_M] - place_M
    steps_M[row_starts[-1] :] = 0
    flat = {
        "key_token_K": _padded(torch.cat([r.ids_T[1:-1] for r in rows]).long(), more_K),
        "key_pos_K": place_K,
        "query_key_M": (key0_B + first_B)[row_M] + place_M,
        "token_M": _padded(torch.cat([r.ids_T[r.start : -1] for r in rows]).long(), more_M),
        "truth_M": _padded(torch.cat([r.ids_T[r.start + 1 :] for r in rows]).long(), more_M),
        "top1_M": _padded(torch.cat([r.top1_T[r.start : -1] for r in rows]).long(), more_M),
        "steps_M": steps_M,
        "grid_M": row_M * queries + place_M,
        "key_grid_K": row_K * keys + place_K,
        "first_B": first_B,
    }
    to = torch.device(device)
    moved = _move(flat, to)
    aux = _joined([r.kept_TLD[:-2] for r in rows], more_K, to)
    scales = [r.scale_TL[:-2] for r in rows if r.scale_TL is not None]
    return Batch(
        **moved,
        key_aux_KLD=unscaled(aux, _joined(scales, more_K, to)) if scales else aux,
        last_MD=_joined([r.last_SD[r.start - r.last_from : -1] for r in rows], more_M, to),
        query_bounds_B=_move_one(_bounds(lives_B), to),
        key_bounds_B=_move_one(_bounds(keys_B), to),
        steps=steps,
        queries=queries,
        keys=keys,
        row_starts=row_starts,
        pairs_S=pairs_S,
    )


def _rounded(n: int, multiple: int) -> int:
    return n + -n % multiple


def _more(keys: int, lives: int, multiple: int) -> tuple[int, int]:
    """Keys and live positions of the added row: a row has at least as many keys as live positions."""
    more = -lives % multiple
    return _rounded(keys + more, multiple) - keys, more


def _padded(x: Tensor, more: int) -> Tensor:
    return torch.cat([x, x.new_zeros(more)]) if more else x


def _bounds(lengths_B: Tensor) -> Tensor:
    return torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)]).int()


def _enumerate(lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows laid end to end: each element's row, and its place in the row."""
    row = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    return row, torch.arange(len(row)) - (lengths_B.cumsum(0) - lengths_B)[row]


def _move(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """int64 tensors to the device in one transfer."""
    if device.type == "cpu":
        return tensors
    flat = _move_one(torch.cat([t.flatten() for t in tensors.values()]), device)
    parts = flat.split([t.numel() for t in tensors.values()])
    return {n: part.view(t.shape) for (n, t), part in zip(tensors.items(), parts, strict=True)}


def _joined(parts: list[Tensor], more: int, device: torch.device) -> Tensor:
    """Rows end to end and so many zeros, on the device: copied once, into pinned memory, on their way to a GPU."""
    shape = (sum(map(len, parts)) + more, *parts[0].shape[1:])
    here, pinned = parts[0].device, parts[0].device.type == "cpu" and device.type == "cuda"
    out = torch.empty(shape, dtype=parts[0].dtype, device=here, pin_memory=pinned)
    torch.cat([_bits(p) for p in parts], out=_bits(out[: shape[0] - more]))
    _bits(out[shape[0] - more :]).zero_()
    return out.to(device, non_blocking=pinned)


def _bits(x: Tensor) -> Tensor:
    """fp8 as bytes: not every operation knows it."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _move_one(x: Tensor, device: torch.device) -> Tensor:
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
