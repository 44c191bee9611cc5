"""What a serving engine has kept of its steps (plugins/eyas-vllm writes it): read as it grows, put together by row.

    DIR/ready-PID.json  steps-PID-NNNNN.log     the format is told in the plugin

A row's states may lie in many records (its prompt in one or more, each generated token in its own), and the same position in
several, after a preemption: the last one counts. The plugin says which ids were fed; a row whose ids are others is refused.
"""

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eyas.errors import ContractError, SurroundingsError
from eyas.stores.states import RowStates

if TYPE_CHECKING:
    import numpy as np

MAGIC, HEAD = b"EYS1", 8
NO_ID = -1  # top1 where the engine computed no logits
POLL_S = 0.02


class Piece(NamedTuple):
    """A run of positions of one row, in one record."""

    path: Path
    begin: int  # offset of the record's first array
    rows: int  # of the record
    requests: int  # of the record
    first: int  # the piece's first row in the record
    place: int  # its request's place in the record
    position: int
    length: int  # positions


@dataclass
class _File:
    read: int = 0  # bytes
    rows: set[str] = field(default_factory=set)  # named in it and not yet forgotten


class Steps:
    """The records in a folder. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about: dict[str, Any] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self.ends: dict[str, int] = {}  # of each row, the position after the last that was read
        self.files: dict[Path, _File] = {}

    @classmethod
    def opened(cls, folder: Path) -> "Steps":
        """The steps of an engine that runs. Raises SurroundingsError where it keeps none."""
        steps = cls(folder)
        if not steps.ready():
            raise SurroundingsError(
                f"{folder}: the engine runs and keeps no states: its plugin was not loaded (is VLLM_PLUGINS set in engine.env?). "
                "Set extract.with to pass to do without."
            )
        return steps

    def ready(self) -> bool:
        """Whether an engine keeps states here now; fills `about`."""
        for path in self.folder.glob("ready-*.json"):
            self.about = json.loads(path.read_text(encoding="utf-8"))
            return True
        return False

    def poll(self) -> int:
        """Read what has been added; returns the bytes that were new."""
        new = 0
        for path in sorted(self.folder.glob("steps-*.log")):
            file = self.files.setdefault(path, _File())
            size = path.stat().st_size
            with path.open("rb") as f:
                while size - file.read >= HEAD:
                    f.seek(file.read)
                    head = f.read(HEAD)
                    if head[:4] != MAGIC:
                        raise ContractError(
                            f"{path}: no record at byte {file.read}. Generate again with --from generate."
                        )
                    (length,) = struct.unpack("<I", head[4:])
                    if file.read + HEAD + length > size:
                        break
                    about = json.loads(f.read(length))
                    begin = file.read + HEAD + length
                    end = begin + sum(self._sizes(about["rows"], len(about["requests"])))
                    if end > size:
                        break
                    self._note(path, file, about, begin)
                    new, file.read = new + end - file.read, end
        return new

    def _sizes(self, rows: int, requests: int) -> tuple[int, int, int, int]:
        """Bytes of a record's ids, top1, aux and last."""
        layers, hidden = len(self.about["layers"]) - 1, self.about["hidden"]
        aux, last = _bytes(self.about["aux_dtype"]), _bytes(self.about["last_dtype"])
        return 4 * rows, 4 * requests, rows * layers * hidden * aux, rows * hidden * last

    def _note(self, path: Path, file: _File, about: dict[str, Any], begin: int) -> None:
        first = 0
        for place, (row, position, count) in enumerate(about["requests"]):
            piece = Piece(path, begin, about["rows"], len(about["requests"]), first, place, position, count)
            self.pieces.setdefault(row, []).append(piece)
            self.ends[row] = max(self.ends.get(row, 0), position + count)
            file.rows.add(row)
            first += count

    def wait(self, lengths: dict[str, int], stall_s: float = 60.0) -> None:
        """Until the first `lengths[row]` positions of every row are there.

        Raises SurroundingsError when the engine has stopped keeping states, or nothing was added for `stall_s` seconds.
        """
        began, size = time.monotonic(), 0
        while lacking := {row for row, n in lengths.items() if not self._covers(row, n)}:
            self.poll()
            written = sum(path.stat().st_size for path in self.folder.glob("steps-*.log"))
            if written != size:  # also half a record: a slow disk is no fault
                began, size = time.monotonic(), written
            elif not self.ready():
                raise SurroundingsError(
                    f"{self.folder}: the engine has stopped keeping states; its log says why (a full disk?). What was finished is "
                    "kept: free space and type the same command again, or set extract.with to pass."
                )
            elif time.monotonic() - began > stall_s:
                raise SurroundingsError(
                    f"{self.folder}: the states of {len(lacking)} answers did not come in {stall_s:.0f} s. Look at the server's log."
                )
            time.sleep(POLL_S)

    def _covers(self, row: str, length: int) -> bool:
        """Records come in order, so a row is there when its last position is; a gap before it is found when it is put together."""
        return self.ends.get(row, 0) >= length

    def row(self, row: str, ids: list[int], start: int, length: int) -> RowStates:
        """States of a row's first `length` positions; zeros, and no top1, after them. start: of the completion.

        Raises ContractError where a position is missing, or other ids were fed.
        """
        import numpy as np
        import torch

        layers, hidden = len(self.about["layers"]) - 1, self.about["hidden"]
        fed, top1 = np.full(len(ids), NO_ID, np.int32), np.full(len(ids), NO_ID, np.int32)
        wide = _wide(self.about["aux_dtype"]), _wide(self.about["last_dtype"])
        aux, last = np.zeros((len(ids), layers, hidden), wide[0]), np.zeros((len(ids), hidden), wide[1])
        opened: dict[Path, np.ndarray] = {}
        for p in self.pieces.get(row, ()):
            n = min(p.length, length - p.position)
            if n <= 0:
                continue
            if p.path not in opened:
                opened[p.path] = np.memmap(p.path, np.uint8, "r")
            whole, to = opened[p.path], slice(p.position, p.position + n)
            sizes = self._sizes(p.rows, p.requests)
            at, arrays = p.begin, []
            for size in sizes:
                arrays.append(whole[at : at + size])
                at += size
            rows = slice(p.first, p.first + n)
            fed[to] = arrays[0].view(np.int32)[rows]
            if n == p.length:
                top1[p.position + n - 1] = arrays[1].view(np.int32)[p.place]
            aux[to] = arrays[2].view(wide[0]).reshape(p.rows, layers, hidden)[rows]
            last[to] = arrays[3].view(wide[1]).reshape(p.rows, hidden)[rows]
        differs = np.flatnonzero(fed[:length] != np.array(ids[:length], np.int32))
        if len(differs):
            at = int(differs[0])
            found = "none was fed" if fed[at] == NO_ID else f"the engine was fed {fed[at]}"
            raise ContractError(
                f"row {row}: position {at} of {length} holds id {ids[at]}, and {found}. These states are not of this conversation."
            )
        return RowStates(
            row, torch.tensor(ids, dtype=torch.int32), _tensor(aux, self.about["aux_dtype"]),
            _tensor(last, self.about["last_dtype"]), torch.from_numpy(top1), start,
        )  # fmt: skip

    def forget(self, rows: list[str]) -> None:
        """Drop rows, and the files in which no other row is left and to which nothing more is written."""
        for row in rows:
            self.pieces.pop(row, None)
            self.ends.pop(row, None)
        newest = {path.name.split("-")[1]: path for path in sorted(self.files)}
        for path, file in list(self.files.items()):
            file.rows.difference_update(rows)
            if not file.rows and path not in newest.values():
                path.unlink(missing_ok=True)
                del self.files[path]


def _bytes(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]


def _wide(dtype: str) -> "type[np.int16] | type[np.float32]":
    """A numpy type of the same width: numpy knows no bfloat16."""
    import numpy as np

    return np.float32 if dtype == "float32" else np.int16


def _tensor(array: "np.ndarray", dtype: str) -> Any:
    import torch

    found = torch.from_numpy(array)
    return found if dtype == "float32" else found.view(getattr(torch, dtype))
