"""Conversations: one row per assistant turn, as exact token ids, in Parquet parts.

    conversations/part-00000.parquet …   manifest.json   quarantine.jsonl

A row holds the prompt as the target saw it (history rendered, ids), the completion with its end-of-turn token, and
how it was sampled. Nothing outside this file knows the columns.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
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
    finish_reason: str  # "stop" or "length"
    temperature: float
    top_p: float
    target: str  # fingerprint
    text: str = ""  # the answer as it stands in the history of later turns, without thoughts

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

    pq.write_table(
        pa.Table.from_pylist([asdict(r) for r in rows], schema=_schema()), path, compression="zstd"
    )


def read_part(path: Path) -> list[Row]:
    """Raises ContractError when the file is no Parquet file of ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        missing = [f.name for f in fields(Row) if f.name not in pq.read_schema(path).names]
        if missing:
            raise pa.ArrowInvalid(f"it has no column {', '.join(missing)}: written by another version")
        return [Row(**r) for r in pq.read_table(path, schema=_schema()).to_pylist()]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ContractError(
            f"{path}: not a readable part of conversations ({e}). Run generate again with --from generate."
        ) from e


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def read(folder: Path, split: str | None = None) -> Iterator[Row]:
    """All rows of a conversations folder in their written order, one split or both."""
    for path in parts(folder):
        for row in read_part(path):
            if split in (None, row.split):
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
