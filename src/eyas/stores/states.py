"""Hidden states of conversations, in sharded safetensors.

    states/shard-00000.safetensors   ids       [T]      int32     token ids, prompt and completion, rows end to end
                                     aux       [T,L,D]  bf16      aux hidden states (id i = input of layer i); float32, or
                                                        fp8       float8_e4m3fn, to be multiplied by
                                     aux_scale [T,L]    float32   (fp8 alone) largest magnitude of a state / 448
                                     last      [S,D]              last hidden state BEFORE the final norm, in the
                                                                  precision in which the target computed it, of each
                                                                  row's answer and the position before it
                                     top1      [T]      int32     argmax of the target's own logits at each position
                                     offsets   [R+1]    int64     row r is [offsets[r], offsets[r+1])
                                     starts    [R]      int32     length of row r's prompt
           manifest.json             shards with checksum and rows, aux layer ids, checks

T tokens of a shard, S of them from a row's start - 1 on (what is supervised), L aux layers, D target width, R rows.
"""

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
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
    kept_TLD: "torch.Tensor"  # aux states as they are stored
    last_SD: "torch.Tensor"  # of the last S positions: see last_from
    top1_T: "torch.Tensor"
    start: int
    scale_TL: "torch.Tensor | None" = None  # of fp8 states

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def aux_TLD(self) -> "torch.Tensor":
        """The aux states; of fp8 ones, what they stand for, in bfloat16."""
        return self.kept_TLD if self.scale_TL is None else unscaled(self.kept_TLD, self.scale_TL)

    @property
    def last_from(self) -> int:
        """The first position whose last state is there."""
        return len(self.ids_T) - len(self.last_SD)

    def ids(self) -> Any:
        return self.ids_T

    def load(self) -> "RowStates":
        """Itself: a row that is loaded stands wherever a RowRef does."""
        return self


FP8_MOST = 448.0  # float8_e4m3fn


def scaled(aux_TLD: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """States as fp8, and their scales [T, L]: of every token and layer the largest magnitude becomes 448."""
    import torch

    x = aux_TLD.float()
    scale_TL = x.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * FP8_MOST) / FP8_MOST
    return (x / scale_TL[..., None]).to(torch.float8_e4m3fn), scale_TL


def unscaled(kept_TLD: "torch.Tensor", scale_TL: "torch.Tensor") -> "torch.Tensor":
    """What fp8 states stand for, in bfloat16."""
    import torch

    return (kept_TLD.float() * scale_TL[..., None]).to(torch.bfloat16)


def bytes_per_token(layers: int, hidden: int, dtype: str, last_bytes: int) -> int:
    """Disk of one answer's token: aux states in dtype (bfloat16, float32, fp8), last state, id and top1. Prompts have no last state."""
    aux = layers * (hidden + 4) if dtype == "fp8" else layers * hidden * (2 if dtype == "bfloat16" else 4)
    return aux + hidden * last_bytes + ID_BYTES


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


def write_shard(path: Path, rows: list[RowStates], checks: dict[str, int], fp8: bool = False) -> None:
    """Write rows to `path` (a temporary name: the caller makes it atomic); `checks` are counts kept in the header. With fp8 the header
    also has the relative error of the round trip, by layer."""
    import torch

    lengths = torch.tensor([0] + [len(r) for r in rows], dtype=torch.int64)
    tensors = {
        "ids": torch.cat([r.ids_T for r in rows]).to(torch.int32),
        "last": torch.cat([r.last_SD[_first(r.start) - r.last_from :] for r in rows]),
        "top1": torch.cat([r.top1_T for r in rows]).to(torch.int32),
        "offsets": lengths.cumsum(0),
        "starts": torch.tensor([r.start for r in rows], dtype=torch.int32),
    }
    about = {"rows": [r.row_id for r in rows], "checks": checks}
    if fp8:
        both = [scaled(r.aux_TLD) for r in rows]
        tensors |= {"aux": torch.cat([x for x, _ in both]), "aux_scale": torch.cat([s for _, s in both])}
        lost = [_lost(r.aux_TLD.float(), *kept) for r, kept in zip(rows, both, strict=True)]
        about["round_trip"] = (torch.stack(lost).sum(0) / max(int(lengths.sum()), 1)).tolist()
    else:
        tensors["aux"] = torch.cat([r.aux_TLD for r in rows])
    tensor_files.save(tensors, path, {"about": json.dumps(about)})


def _lost(aux_TLD: "torch.Tensor", kept_TLD: "torch.Tensor", scale_TL: "torch.Tensor") -> "torch.Tensor":
    """[L]: |x - x'| / |x| of every state, summed over the tokens."""
    wrong = (aux_TLD - unscaled(kept_TLD, scale_TL).float()).norm(dim=-1)
    return (wrong / aux_TLD.norm(dim=-1).clamp_min(1e-30)).sum(0)


def _first(start: int) -> int:
    """The first position whose last state is stored: it decides the answer's first token."""
    return max(start - 1, 0)


@dataclass(frozen=True)
class RowRef:
    """Where a row lies. `load` reads its slices alone, so that training never holds more than a step."""

    path: Path
    row_id: str
    begin: int
    end: int
    start: int  # index of the first completion token, from begin
    last_begin: int  # place of its first last state

    def __len__(self) -> int:
        return self.end - self.begin

    def ids(self) -> Any:
        return _opened(self.path).get_slice("ids")[self.begin : self.end]

    def load(self) -> RowStates:
        f = _opened(self.path)
        return self.of({name: f.get_slice(name) for name in _names(f)})

    def of(self, shard: Mapping[str, Any]) -> RowStates:
        """The row, from its shard's tensors or what is sliced like them."""
        at = slice(self.begin, self.end)
        last = shard["last"][self.last_begin : self.last_begin + len(self) - _first(self.start)]
        scale = shard["aux_scale"][at] if "aux_scale" in shard else None
        return RowStates(
            self.row_id, shard["ids"][at], shard["aux"][at], last, shard["top1"][at], self.start, scale
        )


def _names(shard: Any) -> list[str]:
    return [n for n in ("ids", "aux", "last", "top1", "aux_scale") if n in shard.keys()]  # noqa: SIM118


def load_all(rows: Sequence[RowRef], device: str) -> list[RowStates]:
    """Rows with their states on `device` (ids and top1 stay on the CPU), each shard read once."""
    import torch

    whole = {}
    for path in {r.path for r in rows}:
        f = _opened(path)
        whole[path] = {n: f.get_tensor(n) for n in _names(f)}
        large = whole[path].keys() - {"ids", "top1"}
        whole[path] |= {n: whole[path][n].to(torch.device(device)) for n in large}
    return [r.of(whole[r.path]) for r in rows]


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
    tokens = {name: f.get_slice(name).get_shape()[0] for name in _names(f)}
    fits = len(edges) == len(about["rows"]) + 1 and len(starts) == len(about["rows"])
    lasts = [0]
    if fits:
        lasts += [b - a - _first(s) for a, b, s in zip(edges, edges[1:], starts, strict=False)]
        lasts = list(itertools.accumulate(lasts))
    if (
        not fits
        or {n for name, n in tokens.items() if name != "last"} != {edges[-1]}
        or tokens["last"] != lasts[-1]
    ):
        raise ContractError(
            f"{path}: {len(about['rows'])} rows and {tokens} tokens do not fit its offsets. {AGAIN}"
        )
    return [
        RowRef(path, row_id, a, b, start, last)
        for row_id, a, b, start, last in zip(about["rows"], edges, edges[1:], starts, lasts, strict=False)
    ]


def _about(path: Path) -> dict[str, Any]:
    """The header: row ids and counts. Raises ContractError where the file is not a shard of ours."""
    from safetensors import SafetensorError

    try:
        f = _opened(path)
        about = json.loads(f.metadata()["about"])
        if not {"ids", "aux", "last", "top1", "offsets", "starts"} <= set(f.keys()):
            raise KeyError("a tensor is missing")
        lost = dict(about).get("round_trip")
        return {
            "rows": list(about["rows"]),
            "checks": dict(about["checks"]),
            "round_trip": lost and list(lost),
        }
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as e:
        raise ContractError(f"{path}: not a readable states shard ({e}). {AGAIN}") from e


def read_checks(path: Path) -> dict[str, int]:
    """The counts in a shard's header. Raises ContractError where there is none."""
    return _about(path)["checks"]


def round_trip(folder: Path, shards: Sequence[dict[str, Any]]) -> list[float] | None:
    """Of fp8 states: mean relative error of a stored state, by layer; None of others."""
    found = [
        (_about(folder / s["file"])["round_trip"], sum(len(r) for r in rows_of(folder / s["file"])))
        for s in shards
    ]
    if not found or any(lost is None for lost, _ in found):
        return None
    total = sum(n for _, n in found)
    return [sum(lost[i] * n for lost, n in found) / max(total, 1) for i in range(len(found[0][0]))]
