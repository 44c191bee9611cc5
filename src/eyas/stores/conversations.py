"""Conversations: one row per assistant turn, as exact token ids, in Parquet parts.

    conversations/part-00000.parquet …   manifest.json   quarantine.jsonl

A row holds the prompt as the target saw it (history rendered, ids), the completion with its end-of-turn token, and
how it was sampled. A flagged row is kept, so that it is not asked again, and is none that anything is trained or measured on. Nothing
outside this file knows the columns.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from eyas.errors import ContractError

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One assistant turn. The completion occupies [len(prompt_ids), len(prompt_ids) + len(completion_ids))."""

    row_id: str  # hash of prompt, sampling, target, sample number
    prompt_id: str
    prompt_key: str  # hash of the normalised first user turn: the same prompt in every run
    domain: str
    split: str  # "train" or "held_out"
    turn: int
    sample: int
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str  # "stop", "length" or "tool_calls"
    temperature: float
    top_p: float
    target: str  # fingerprint
    text: str = ""  # the answer as it stands in the history of later turns, without thoughts
    reasoning: str = ""  # its thought
    calls: str = ""  # its tool calls, and what was answered to them, as messages: JSON
    results: str = ""
    tools: str = ""  # the definitions that were sent, JSON
    otherwise: int = 0  # 1: the server read the prompt as other ids than the template gives here
    source: str = "ids"  # "ids" as the engine returned them, or "text" that was tokenised again
    flag: str = ""  # why the row is left out

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


def _schema() -> Any:
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int32(), float: pa.float64(), list[int]: pa.list_(pa.int32())}
    return pa.schema([(f.name, types[f.type]) for f in fields(Row)])  # type: ignore[index]


def write_part(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to `path` (a temporary name: the caller makes it atomic)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    held = list(rows)
    columns = {f.name: [getattr(r, f.name) for r in held] for f in fields(Row)}
    pq.write_table(pa.Table.from_pydict(columns, schema=_schema()), path, compression="zstd")


def read_part(path: Path) -> list[Row]:
    """All rows of a part, flagged ones too. Raises ContractError when the file is no Parquet file of ours."""
    return [Row(**r) for r in _columns(path, [f.name for f in fields(Row)])]


def row_ids(path: Path) -> list[str]:
    """The row ids of a part; the file is read through, so that a torn one is found. Raises ContractError."""
    return [r["row_id"] for r in _columns(path, [f.name for f in fields(Row)], ["row_id"])]


def said(path: Path) -> dict[str, tuple[str, str, str, str]]:
    """By row id: text, reasoning, calls and results. Raises ContractError."""
    names = ["row_id", "text", "reasoning", "calls", "results"]
    return {r["row_id"]: tuple(r[n] for n in names[1:]) for r in _columns(path, names)}


def _columns(path: Path, names: list[str], shown: list[str] | None = None) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        missing = [n for n in names if n not in pq.read_schema(path).names]
        if missing:
            raise pa.ArrowInvalid(f"it has no column {', '.join(missing)}: written by another version")
        types = _schema()
        table = pq.read_table(path, schema=pa.schema([types.field(n) for n in names]))
        return list(table.select(shown or names).to_pylist())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ContractError(
            f"{path}: not a readable part of conversations ({e}). Run generate again with --from generate."
        ) from e


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"), key=number)


def number(path: Path) -> int:
    """Of a part, by its name."""
    found = re.search(r"part-(\d+)", path.name)
    return int(found[1]) if found else -1


def read(folder: Path, split: str | None = None) -> Iterator[Row]:
    """The rows of a conversations folder in their written order, one split or both, without flagged ones."""
    for path in parts(folder):
        for row in read_part(path):
            if split in (None, row.split) and not row.flag:
                yield row


def spread(items: list[T], limit: int | None, group: Callable[[T], str]) -> list[T]:
    """The first `limit` items taken in turn from each group, in their original order."""
    if limit is None or limit >= len(items):
        return items
    queues: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        queues.setdefault(group(item), []).append(i)
    ranked = sorted((n, i) for queue in queues.values() for n, i in enumerate(queue))
    return [items[i] for i in sorted(i for _, i in ranked[:limit])]
