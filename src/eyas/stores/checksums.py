"""Checksums of shards, each verified once: at once where that takes seconds, else on threads while training goes on."""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eyas.errors import ContractError
from eyas.stores import states

AT_ONCE = 4 * 2**30  # bytes
HASHERS = 2  # beside training


class Checksums:
    """Verifies a folder's shards against its manifest. remembered: a file of those that were verified, which are not read again while
    size and time of change stay as they were; without one, all are read, and at once."""

    def __init__(self, folder: Path, shards: Sequence[dict[str, Any]], remembered: Path | None) -> None:
        self.known = _read(remembered)
        self.wanted = {folder / s["file"]: s["sha256"] for s in shards}
        todo = [p for p, sha in self.wanted.items() if self.known.get(p.name) != [sha, *_stamp(p)]]
        self.bytes = sum(p.stat().st_size for p in todo)
        beside = remembered is not None and self.bytes > AT_ONCE
        self.remembered = remembered if beside else None  # what takes seconds is read again
        self.pool = ThreadPoolExecutor(HASHERS if beside else states.HASHERS)
        self.waiting: list[tuple[Path, Future[tuple[str, list[int]]]]] = [
            (p, self.pool.submit(_hashed, p)) for p in todo
        ]
        if not beside:
            self.wait()

    @property
    def done(self) -> bool:
        return not self.waiting

    def look(self) -> None:
        """Raises ContractError for a shard that was found to be another than the one written; waits for nothing."""
        while self.waiting and self.waiting[0][1].done():
            self._take()

    def wait(self) -> None:
        """All of them. Raises ContractError as `look` does."""
        while self.waiting:
            self._take()

    def close(self) -> None:
        """Verify no more."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> None:
        path, future = self.waiting.pop(0)
        (found, stamp), wanted = future.result(), self.wanted[path]
        if found != wanted:
            self.close()
            raise ContractError(
                f"{path}: checksum {found[:12]}… where the manifest has {wanted[:12]}…. {states.AGAIN}"
            )
        self.known[path.name] = [wanted, *stamp]
        if self.done:
            self.close()
        if self.remembered:
            self.remembered.parent.mkdir(parents=True, exist_ok=True)
            partial = self.remembered.with_suffix(".partial")
            partial.write_text(json.dumps(self.known), encoding="utf-8")
            partial.replace(self.remembered)


def _read(path: Path | None) -> dict[str, list[Any]]:
    """What was verified; nothing where that cannot be read, since it is then only verified again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


def _hashed(path: Path) -> tuple[str, list[int]]:
    stamp = _stamp(path)
    return states.hashed(path), stamp
