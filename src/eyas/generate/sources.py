"""Where prompts come from: each source as a stream of (place, JSON value), whatever it is made of.

    {path: FILE.jsonl|FILE.parquet|builtin}     {dataset: NAME, split: train}     {log: FILE.jsonl}     {self: NUMBER}   (selfprompt.py)

A dataset is one of Hugging Face's `datasets` (extra `data`): a name of the hub, a folder, or one of the presets, which know the columns.
A log holds requests in OpenAI's format, one a line, bare or inside "body" or "request" (the batch format, and what gateways write). Chats
resend their history, so that of several requests of one chat the longest is kept.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import SurroundingsError, UsageError
from eyas.recipe import SHIPPED
from eyas.rundir import fingerprint
from eyas.schema import PromptSource

BUILTIN = SHIPPED / "assets" / "prompts.jsonl"
Found = tuple[str, Any]  # the place, and its value or the exception that it is
COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "question")


def source_path(path: str) -> Path:
    return BUILTIN if path == "builtin" else Path(path)


def files(source: PromptSource) -> list[Path]:
    """Those that a source is read from."""
    return [source_path(p) for p in (source.path, source.log) if p]


def name_of(source: PromptSource) -> str:
    """As reports and ids call it."""
    if source.self_ is not None:
        return "self"
    return Path(source.path or source.log or source.dataset or "").stem or "source"


def stream(source: PromptSource) -> Iterator[Found]:
    """A source's values. Raises UsageError where it cannot be read, SurroundingsError where `datasets` is missing."""
    if source.log is not None:
        return _log(Path(source.log))
    if source.dataset is not None:
        return _dataset(source.dataset, source.split)
    path = source_path(source.path or "")
    return _parquet(path) if path.suffix == ".parquet" else lines(path)


def lines(path: Path) -> Iterator[Found]:
    """JSON by lines. Raises UsageError where the file cannot be read."""
    try:
        with path.open("rb") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield f"{path.name}:{number}", _json(line)
    except OSError as e:
        raise UsageError(f"prompts.sources: cannot read {path}: {e.strerror}") from e


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        return e


def _parquet(path: Path) -> Iterator[Found]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(1024):
                for value in batch.to_pylist():
                    number += 1
                    yield f"{path.name}:{number}", _row(value)
    except (pa.ArrowException, OSError) as e:
        raise UsageError(f"prompts.sources: cannot read {path}: {e}") from e


def _row(value: dict[str, Any]) -> dict[str, Any]:
    """A row of a table as a line would say it: empty columns left out; of several known columns the first; ShareGPT's and others' words."""
    row = {k: v for k, v in value.items() if v is not None}
    name = next((c for c in COLUMNS if row.get(c)), None)
    if name in ("conversations", "conversation"):
        row["messages"] = row.pop(name)
    elif name == "instruction":
        row["prompt"] = "\n\n".join(str(row[k]) for k in ("instruction", "input") if row.get(k))
    elif name == "question":
        row["prompt"] = row["question"]
    return row


# ---- Hugging Face datasets ----

PRESETS: dict[str, tuple[str, str]] = {  # name: the hub's name and split
    "ultrachat": ("HuggingFaceH4/ultrachat_200k", "train_sft"),
    "magpie": ("Magpie-Align/Magpie-Pro-300K-Filtered", "train"),
    "openhermes": ("teknium/OpenHermes-2.5", "train"),
    "tulu3": ("allenai/tulu-3-sft-mixture", "train"),
    "gsm8k": ("openai/gsm8k:main", "train"),
    "alpaca": ("tatsu-lab/alpaca", "train"),
}


def _dataset(name: str, split: str | None) -> Iterator[Found]:
    try:
        import datasets
    except ImportError as e:
        raise SurroundingsError(
            'prompts.sources: a dataset needs the package "datasets": pip install "eyas[data]"'
        ) from e
    hub, usual = PRESETS.get(name, (name, "train"))
    where, _, config = hub.partition(":") if not Path(hub).exists() else (hub, "", "")
    try:
        made = datasets.load_dataset(where, config or None, split=split or usual, streaming=True)
        for number, value in enumerate(made, 1):
            yield f"{name}:{number}", _row(value)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as e:
        raise UsageError(
            f"prompts.sources: the dataset {name} (split {split or usual}) cannot be read: {' '.join(str(e).split())[:300]}. "
            f"Give a name of the hub, a folder, or one of {', '.join(PRESETS)}."
        ) from e


# ---- request logs ----


def _log(path: Path) -> Iterator[Found]:
    kept: dict[str, Found] = {}  # by the chat's messages
    continued: set[str] = set()
    for where, value in lines(path):
        body = _request(value)
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            yield (
                where,
                ValueError('is no chat request: it has no "messages", bare or in "body" or "request"'),
            )
            continue
        messages = body["messages"]
        shorter = {fingerprint(messages[:length]) for length in range(1, len(messages))}
        continued |= shorter
        for key in shorter:
            kept.pop(key, None)
        key = fingerprint(messages)
        if key not in continued:
            kept.setdefault(key, (where, {k: body[k] for k in ("messages", "tools") if body.get(k)}))
    yield from kept.values()


def _request(value: Any) -> Any:
    for name in ("body", "request"):
        if isinstance(value, dict) and "messages" not in value and name in value:
            inner = value[name]
            value = _json(inner.encode()) if isinstance(inner, str) else inner
    return value
