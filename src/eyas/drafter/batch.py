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


@dataclass(frozen=True)
class Batch:
    """Flat tensors on one device, and the padded grids that attention uses. Padding points one past the end."""

    key_token_K: Tensor  # x[t+1] of each key
    key_aux_KLD: Tensor  # g[t] of each key
    key_pos_K: Tensor  # t, the rope position
    query_key_M: Tensor  # index of the live position among the keys
    token_M: Tensor  # x[t+1]
    truth_M: Tensor  # x[t+2]
    last_MD: Tensor  # y[t+1], before the final norm
    top1_M: Tensor  # the target's argmax after position t+1
    steps_M: Tensor  # for how many draft steps this position lives
    row_M: Tensor  # row number
    grid_M: Tensor  # place of m in the flattened query grid [B*Q]
    query_grid_BQ: Tensor  # m, or M for padding
    key_grid_BJ: Tensor  # key index, or K for padding
    first_B: Tensor  # key number (in its row) of a row's first live position: s - 1
    row_starts: tuple[int, ...]  # first m of each row, and M

    @property
    def pairs(self) -> int:
        """Live pairs at step 0, which is the number of supervised tokens."""
        return len(self.token_M)


def usable(row: RowStates | RowRef) -> bool:
    """Whether a row has any pair: a completion of at least two tokens after at least one prompt token."""
    return row.start >= 1 and len(row) - row.start >= 2


def pack(rows: Sequence[RowStates], device: torch.device | str = "cpu") -> Batch:
    """Pack usable rows end to end. Raises ValueError for a row that is not usable."""
    for row in rows:
        if not usable(row):
            raise ValueError(f"row {row.row_id} has no supervised pair")
    keys = [len(r) - 2 for r in rows]
    lives = [len(r) - r.start - 1 for r in rows]
    n_keys, n_live = sum(keys), sum(lives)
    query_grid = torch.full((len(rows), max(lives)), n_live)
    key_grid = torch.full((len(rows), max(keys)), n_keys)
    query_key, row_of, grid, steps = [], [], [], []
    k0 = m0 = 0
    for b, (row, nk, nm) in enumerate(zip(rows, keys, lives, strict=True)):
        key_grid[b, :nk] = torch.arange(k0, k0 + nk)
        query_grid[b, :nm] = torch.arange(m0, m0 + nm)
        query_key.append(torch.arange(nm) + k0 + row.start - 1)
        row_of.append(torch.full((nm,), b))
        grid.append(torch.arange(nm) + b * query_grid.shape[1])
        steps.append(torch.arange(nm, 0, -1))
        k0, m0 = k0 + nk, m0 + nm
    starts = torch.tensor([0, *lives]).cumsum(0).tolist()
    tensors = {
        "key_token_K": torch.cat([r.ids_T[1:-1] for r in rows]).long(),
        "key_aux_KLD": torch.cat([r.aux_TLD[:-2] for r in rows]),
        "key_pos_K": torch.cat([torch.arange(n) for n in keys]),
        "query_key_M": torch.cat(query_key),
        "token_M": torch.cat([r.ids_T[r.start : -1] for r in rows]).long(),
        "truth_M": torch.cat([r.ids_T[r.start + 1 :] for r in rows]).long(),
        "last_MD": torch.cat([r.last_TD[r.start : -1] for r in rows]),
        "top1_M": torch.cat([r.top1_T[r.start : -1] for r in rows]).long(),
        "steps_M": torch.cat(steps),
        "row_M": torch.cat(row_of),
        "grid_M": torch.cat(grid),
        "query_grid_BQ": query_grid,
        "key_grid_BJ": key_grid,
        "first_B": torch.tensor([r.start - 1 for r in rows]),
    }
    return Batch(**{n: t.to(device) for n, t in tensors.items()}, row_starts=tuple(starts))
