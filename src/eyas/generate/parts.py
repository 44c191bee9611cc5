"""Rows on their way to disk, and those that are there already.

    conversations/part-00000.parquet …     some rows each, in the order in which they were answered; written whole or not at all
                  torn-part-00003.parquet  a part that cannot be read any more: its rows are asked again

A row is found by its id alone, so that a run goes on after a kill whatever the order, the concurrency, or the prompts are now: what is there
is not asked again, what is missing is, and what the recipe no longer wants is dropped by finish().
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from eyas.errors import ContractError
from eyas.generate.conversing import Said, Stored
from eyas.generate.keeping import Keeper
from eyas.progress import say
from eyas.rundir import atomic
from eyas.stores import conversations
from eyas.stores.conversations import Row

FLUSH_S = 60.0  # a part is written after so long, full or not


class Parts:
    """Used as `with Parts(folder, …) as parts`; rows given to `add` are on disk at the end of the block."""

    def __init__(self, folder: Path, rows_each: int, keeper: Keeper | None) -> None:
        self.folder, self.rows_each, self.keeper = folder, rows_each, keeper
        self.place: dict[str, int] = {}  # row id -> part
        self.visited: set[str] = set()
        self.waiting: list[Row] = []
        self.flushed = time.monotonic()
        self.behind = _OneBehind()
        self.doubled: set[int] = set()  # parts
        self.open_part, self.open_said = -1, dict[str, tuple[str, str, str, str]]()
        for path in conversations.parts(folder):
            self._index(path)
        self.next = 1 + max((conversations.number(p) for p in self._every()), default=-1)

    def _every(self) -> list[Path]:
        return [*conversations.parts(self.folder), *self.folder.glob("torn-part-*.parquet")]

    def _index(self, path: Path) -> None:
        try:
            names = conversations.row_ids(path)
        except ContractError:
            path.replace(path.with_name(f"torn-{path.name}"))
            say(f"  {path} cannot be read: set aside as torn-{path.name}, and its rows are asked again")
            return
        number = conversations.number(path)
        if len(set(names)) < len(names) or self.place.keys() & set(names):
            self.doubled.add(number)
        self.place |= {n: number for n in names if n not in self.place}

    def __enter__(self) -> "Parts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """What was answered is kept, also where something failed or Ctrl-C came."""
        try:
            if kind is None or not issubclass(kind, ContractError):
                self.flush()
        finally:
            self.behind.close(raising=kind is None)

    def visit(self, row_id: str, history: bool) -> Stored | None:
        """The recipe wants this row; what it said, if it is there (history: only then is it read)."""
        self.visited.add(row_id)
        if row_id not in self.place:
            return None
        return self._said(row_id) if history else Stored(Said(""), [])

    def _said(self, row_id: str) -> Stored:
        part = self.place[row_id]
        if self.open_part != part:
            self.open_part, self.open_said = part, conversations.said(self.path(part))
        text, reasoning, calls, results = self.open_said[row_id]
        said = Said(text, reasoning, json.loads(calls) if calls else [])
        return Stored(said, json.loads(results) if results else [])

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.parquet"

    def add(self, row: Row) -> None:
        """A new row."""
        self.visited.add(row.row_id)
        self.waiting.append(row)
        if len(self.waiting) >= self.rows_each or time.monotonic() - self.flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a part, while the next rows come."""
        if not self.waiting:
            return
        path = self.path(self.next)
        rows, self.waiting, self.flushed = self.waiting, [], time.monotonic()
        self.behind(partial(_write, path, self.next, rows, self.keeper))
        self.next += 1

    def finish(self) -> int:
        """Drop rows that are there twice, or that the recipe no longer wants; returns how many of the latter."""
        dropped = 0
        for path in conversations.parts(self.folder):
            number = conversations.number(path)
            names = conversations.row_ids(path)
            unwanted = [n for n in names if n not in self.visited]
            if not unwanted and number not in self.doubled:
                continue
            mine = (r for r in conversations.read_part(path) if self.place.get(r.row_id, number) == number)
            kept = {r.row_id: r for r in mine if r.row_id in self.visited}
            dropped += len(unwanted)
            if self.keeper:
                self.keeper.drop(number)
            if kept:
                with atomic(path) as tmp:
                    conversations.write_part(tmp, kept.values())
            else:
                path.unlink()
        return dropped


def _write(path: Path, number: int, rows: list[Row], keeper: Keeper | None) -> None:
    """A part, its states first: a part that is there has them."""
    if keeper:
        keeper.part(number, rows)
    with atomic(path) as tmp:
        conversations.write_part(tmp, rows)


class _OneBehind:
    """Does a part's writing while the next part is answered; an error of it comes at the next call, or at the end."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.last: Future[None] | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        if self.last:
            self.last.result()
        self.last = self.pool.submit(work)

    def close(self, raising: bool) -> None:
        self.pool.shutdown()
        if self.last and raising:
            self.last.result()
