"""Hidden states of conversations, in sharded safetensors.

    states/shard-00000.safetensors   ids       [T]      int32     token ids, prompt and completion, rows end to end
                                     aux       [T,L,D]  bf16      aux hidden states (id i = input of layer i)
                                     last      [T,D]              last hidden state BEFORE the final norm, in the
                                                                  precision in which the target computed it
                                     top1      [T]      int32     argmax of the target's own logits at each position
                                     offsets   [R+1]    int64     row r is [offsets[r], offsets[r+1])
                                     starts    [R]      int32     length of row r's prompt
           manifest.json             shards with checksum and rows, aux layer ids, checks

T tokens of a shard, L aux layers, D target width, R rows.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import ContractError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RowStates:
    """One row's ids and states; `start` is the index of the first completion token."""

    row_id: str
    ids_T: "torch.Tensor"
    aux_TLD: "torch.Tensor"
    last_TD: "torch.Tensor"
    top1_T: "torch.Tensor"
    start: int

    def __len__(self) -> int:
        return len(self.ids_T)


def bytes_per_token(layers: int, hidden: int, aux_bytes: int, last_bytes: int) -> int:
    """Disk of one token: aux states, last state, id and top1."""
    return layers * hidden * aux_bytes + hidden * last_bytes + 8


def write_shard(path: Path, rows: list[RowStates], checks: dict[str, int]) -> None:
    """Write rows to `path` (a temporary name: the caller makes it atomic); `checks` are counts kept in the header."""
    import torch
    from safetensors.torch import save_file

    lengths = torch.tensor([0] + [len(r) for r in rows], dtype=torch.int64)
    tensors = {
        "ids": torch.cat([r.ids_T for r in rows]).to(torch.int32),
        "aux": torch.cat([r.aux_TLD for r in rows]),
        "last": torch.cat([r.last_TD for r in rows]),
        "top1": torch.cat([r.top1_T for r in rows]).to(torch.int32),
        "offsets": lengths.cumsum(0),
        "starts": torch.tensor([r.start for r in rows], dtype=torch.int32),
    }
    about = {"rows": [r.row_id for r in rows], "checks": checks}
    save_file(tensors, path, metadata={"about": json.dumps(about)})  # one key: several have no fixed order


def read_shard(path: Path) -> list[RowStates]:
    """Raises ContractError where the file is truncated or has other tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as f:
            t: dict[str, Any] = {
                name: f.get_tensor(name) for name in ("ids", "aux", "last", "top1", "offsets", "starts")
            }
            row_ids = json.loads(f.metadata()["about"])["rows"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ContractError(
            f"{path}: not a readable states shard ({e}). Run extract again with --from extract."
        ) from e
    edges = t["offsets"].tolist()
    if len(edges) != len(row_ids) + 1 or edges[-1] != len(t["ids"]) or len(t["aux"]) != len(t["ids"]):
        raise ContractError(
            f"{path}: {len(row_ids)} rows and {len(t['ids'])} ids do not fit its offsets. Run extract again."
        )
    return [
        RowStates(row_id, t["ids"][a:b], t["aux"][a:b], t["last"][a:b], t["top1"][a:b], int(start))
        for row_id, a, b, start in zip(row_ids, edges, edges[1:], t["starts"].tolist(), strict=False)
    ]


def read_checks(path: Path) -> dict[str, int]:
    """The counts in a shard's header. Raises ContractError where there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as f:
            return json.loads(f.metadata()["about"])["checks"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ContractError(
            f"{path}: not a readable states shard ({e}). Run extract again with --from extract."
        ) from e


def read(folder: Path, shards: list[dict[str, Any]]) -> Iterator[RowStates]:
    """All rows of the shards that a manifest names, checksums verified.

    Raises ContractError when a shard is missing or is not the one that was written.
    """
    import hashlib

    for shard in shards:
        path = folder / shard["file"]
        if not path.is_file():
            raise ContractError(
                f"{path} is missing, though {folder}/manifest.json names it. Run extract again."
            )
        with path.open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != shard["sha256"]:
            raise ContractError(
                f"{path}: checksum {found[:12]}… where the manifest has {shard['sha256'][:12]}…. Run extract again."
            )
        yield from read_shard(path)
