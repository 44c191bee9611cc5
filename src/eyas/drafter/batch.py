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
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.stores.states import RowRef, RowStates

MAX_STEPS = 16


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
    grid_M: Tensor  # place of m in the flattened query grid [B*Q]
    key_grid_K: Tensor  # place of a key in the flattened key grid [B*J]
    first_B: Tensor  # key number (in its row) of a row's first live position: s - 1
    live: tuple[
        Tensor, ...
    ]  # [k]: the positions m that live at draft step k; ends where nothing lives, or at `steps`
    stays: tuple[Tensor, ...]  # [k]: where in live[k-1] those of live[k] stand
    steps: int  # how many draft steps `live` was made for
    queries: int  # Q
    keys: int  # J
    row_starts: tuple[int, ...]  # first m of each row, and M

    @property
    def pairs(self) -> int:
        """Live pairs at step 0, which is the number of supervised tokens."""
        return len(self.token_M)


def usable(row: RowStates | RowRef) -> bool:
    """Whether a row has any pair: a completion of at least two tokens after at least one prompt token."""
    return row.start >= 1 and len(row) - row.start >= 2


def pack(rows: Sequence[RowStates], device: torch.device | str = "cpu", steps: int = MAX_STEPS) -> Batch:
    """Pack usable rows end to end for up to `steps` draft steps. All index arithmetic is done on the CPU and moved at once:
    nothing here waits for a GPU. Raises ValueError for a row that is not usable.
    """
    for row in rows:
        if not usable(row):
            raise ValueError(f"row {row.row_id} has no supervised pair")
    start_B = torch.tensor([r.start for r in rows])
    keys_B = torch.tensor([len(r) for r in rows]) - 2
    lives_B = keys_B + 1 - start_B
    row_K, place_K = _enumerate(keys_B)
    row_M, place_M = _enumerate(lives_B)
    key0_B = keys_B.cumsum(0) - keys_B
    queries, keys = int(lives_B.max()), int(keys_B.max())
    steps_M = lives_B[row_M] - place_M
    live, stays = [torch.arange(len(row_M))], [torch.arange(len(row_M))]
    for k in range(1, min(steps, queries)):
        stays.append((steps_M[live[-1]] > k).nonzero()[:, 0])
        live.append(live[-1][stays[-1]])
    whole = {
        "key_token_K": torch.cat([r.ids_T[1:-1] for r in rows]).long(),
        "key_pos_K": place_K,
        "query_key_M": key0_B[row_M] + start_B[row_M] - 1 + place_M,
        "token_M": torch.cat([r.ids_T[r.start : -1] for r in rows]).long(),
        "truth_M": torch.cat([r.ids_T[r.start + 1 :] for r in rows]).long(),
        "top1_M": torch.cat([r.top1_T[r.start : -1] for r in rows]).long(),
        "grid_M": row_M * queries + place_M,
        "key_grid_K": row_K * keys + place_K,
        "first_B": start_B - 1,
        **{f"live {k}": x for k, x in enumerate(live)},
        **{f"stays {k}": x for k, x in enumerate(stays)},
    }
    moved = _move(whole, torch.device(device))
    return Batch(
        live=tuple(moved.pop(f"live {k}") for k in range(len(live))),
        stays=tuple(moved.pop(f"stays {k}") for k in range(len(stays))),
        **moved,
        key_aux_KLD=_move_one(torch.cat([r.aux_TLD[:-2] for r in rows]), torch.device(device)),
        last_MD=_move_one(torch.cat([r.last_TD[r.start : -1] for r in rows]), torch.device(device)),
        steps=steps,
        queries=queries,
        keys=keys,
        row_starts=tuple([0, *lives_B.cumsum(0).tolist()]),
    )


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


def _move_one(x: Tensor, device: torch.device) -> Tensor:
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
