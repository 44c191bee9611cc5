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

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import ContractError
from eyas.stores import tensors as tensor_files

if TYPE_CHECKING:
    import torch

    from eyas.stores.conversations import Row

OPEN_SHARDS = 64
HASHERS = 4  # threads; hashing releases the interpreter
ID_BYTES = 8  # a token id and a top-1 id
AGAIN = "Extract again with --from extract."


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

    def slice(self, name: str) -> Any:
        return {"ids": self.ids_T, "aux": self.aux_TLD, "last": self.last_TD, "top1": self.top1_T}[name]

    def load(self) -> "RowStates":
        """Itself: a row that is loaded stands wherever a RowRef does."""
        return self


def bytes_per_token(layers: int, hidden: int, aux_bytes: int, last_bytes: int) -> int:
    """Disk of one token: aux states, last state, id and top1."""
    return layers * hidden * aux_bytes + hidden * last_bytes + ID_BYTES


def groups(rows: Sequence["Row"], limit: int, per_token: int) -> Iterator[list["Row"]]:
    """Consecutive rows until a shard is full."""
    group: list[Row] = []
    size = 0
    for row in rows:
        need = len(row.ids) * per_token
        if group and size + need > limit:
            yield group
            group, size = [], 0
        group.append(row)
        size += need
    if group:
        yield group


def write_shard(path: Path, rows: list[RowStates], checks: dict[str, int]) -> None:
    """Write rows to `path` (a temporary name: the caller makes it atomic); `checks` are counts kept in the header."""
    import torch

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
    tensor_files.save(tensors, path, {"about": json.dumps(about)})


@dataclass(frozen=True)
class RowRef:
    """Where a row lies. `load` reads its slices alone, so that training never holds more than a step."""

    path: Path
    row_id: str
    begin: int
    end: int
    start: int  # index of the first completion token, from begin

    def __len__(self) -> int:
        return self.end - self.begin

    def slice(self, name: str) -> Any:
        return _opened(self.path).get_slice(name)[self.begin : self.end]

    def load(self) -> RowStates:
        ids, aux, last, top1 = (self.slice(name) for name in ("ids", "aux", "last", "top1"))
        return RowStates(self.row_id, ids, aux, last, top1, self.start)


def load_all(rows: Sequence[RowRef], device: str) -> list[RowStates]:
    """Rows with their states on `device` (ids and top1 stay on the CPU), each shard read once."""
    import torch

    whole = {}
    for path in {r.path for r in rows}:
        f = _opened(path)
        whole[path] = {n: f.get_tensor(n) for n in ("ids", "aux", "last", "top1")}
        whole[path] |= {n: whole[path][n].to(torch.device(device)) for n in ("aux", "last")}

    def row(r: RowRef) -> RowStates:
        ids, aux, last, top1 = (whole[r.path][n][r.begin : r.end] for n in ("ids", "aux", "last", "top1"))
        return RowStates(r.row_id, ids, aux, last, top1, r.start)

    return [row(r) for r in rows]


def bytes_of(rows: Sequence[RowRef]) -> int:
    """Memory that the shards of these rows take."""
    return sum(path.stat().st_size for path in {r.path for r in rows})


def _opened(path: Path) -> Any:
    """The shard, memory-mapped; kept open until it is replaced or others need the place."""
    about = path.stat()
    return _open(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=OPEN_SHARDS)
def _open(path: Path, mtime_ns: int, size: int) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def refs(folder: Path, shards: Sequence[dict[str, Any]]) -> list[RowRef]:
    """All rows of the shards that a manifest names, neither states nor checksums read (stores/checksums.py).

    Raises ContractError when a shard is missing or no shard of ours.
    """
    return [row for path in _there(folder, shards) for row in rows_of(path)]


def _there(folder: Path, shards: Sequence[dict[str, Any]]) -> list[Path]:
    paths = [folder / shard["file"] for shard in shards]
    for path in paths:
        if not path.is_file():
            raise ContractError(f"{path} is missing, though {folder}/manifest.json names it. {AGAIN}")
    return paths


def verified(folder: Path, shards: Sequence[dict[str, Any]]) -> list[RowRef]:
    """The same, once every checksum is the manifest's."""
    from eyas.stores.checksums import Checksums

    _there(folder, shards)
    Checksums(folder, shards, None)
    return refs(folder, shards)


def hashed(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def load(path: Path, name: str) -> "torch.Tensor":
    """One whole tensor of a shard."""
    return _opened(path).get_tensor(name)


def replace_top1(path: Path, top1_T: "torch.Tensor") -> None:
    """Write another top1 into a shard that no manifest names yet, in place: a kill in between is mended by doing it again."""
    with path.open("r+b") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        begin = json.loads(f.read(length))["top1"]["data_offsets"][0]
        f.seek(8 + length + begin)
        f.write(top1_T.numpy().tobytes())
        f.flush()
        os.fsync(f.fileno())


def rows_of(path: Path) -> list[RowRef]:
    """All rows of one shard. Raises ContractError where the file is truncated or its parts do not fit together."""
    about = _about(path)
    f = _opened(path)
    edges, starts = f.get_tensor("offsets").tolist(), f.get_tensor("starts").tolist()
    tokens = {name: f.get_slice(name).get_shape()[0] for name in ("ids", "aux", "last", "top1")}
    if (
        len(edges) != len(about["rows"]) + 1
        or len(starts) != len(about["rows"])
        or set(tokens.values()) != {edges[-1]}
    ):
        raise ContractError(
            f"{path}: {len(about['rows'])} rows and {tokens} tokens do not fit its offsets. {AGAIN}"
        )
    return [
        RowRef(path, row_id, a, b, start)
        for row_id, a, b, start in zip(about["rows"], edges, edges[1:], starts, strict=False)
    ]


def _about(path: Path) -> dict[str, Any]:
    """The header: row ids and counts. Raises ContractError where the file is not a shard of ours."""
    from safetensors import SafetensorError

    try:
        f = _opened(path)
        about = json.loads(f.metadata()["about"])
        if not {"ids", "aux", "last", "top1", "offsets", "starts"} <= set(f.keys()):
            raise KeyError("a tensor is missing")
        return {"rows": list(about["rows"]), "checks": dict(about["checks"])}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ContractError(f"{path}: not a readable states shard ({e}). {AGAIN}") from e


def read_checks(path: Path) -> dict[str, int]:
    """The counts in a shard's header. Raises ContractError where there is none."""
    return _about(path)["checks"]
