"""What training leaves beside its state: drafter folders, steps.jsonl, evals.jsonl, event files."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eyas.drafter import disk
from eyas.drafter.network import Drafter
from eyas.errors import SurroundingsError
from eyas.rundir import RunDir, write_text


def replace_folder(
    folder: Path, drafter: Drafter, metrics: dict[str, Any], trained_on: Iterable[str] | None
) -> None:
    """Write beside, then swap: at every moment the folder is whole or (for an instant) absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as tmp:
            disk.write(Path(tmp) / "new", drafter, metrics, trained_on)
            if folder.exists():
                folder.rename(Path(tmp) / "old")
            (Path(tmp) / "new").rename(folder)
    except OSError as e:
        raise SurroundingsError(
            f"cannot write {folder}: {e.strerror}. Free space; the training state is kept."
        ) from e


def open_steps(path: Path, step: int, leads: bool = True) -> Any:
    """steps.jsonl for appending, without the lines after `step` that a killed run left; of several processes, the first writes."""
    if not leads:
        return open(os.devnull, "w", encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError):
                break  # the line in which it was killed
    write_text(path, "".join(f"{line}\n" for line in kept))
    return path.open("a", encoding="utf-8")


def append_eval(path: Path, metrics: dict[str, Any]) -> None:
    kept = [e for e in evals(path) if e["epoch"] < metrics["epoch"]]
    write_text(path, "".join(json.dumps(e) + "\n" for e in [*kept, metrics]))


def evals(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    )


class _Silent:
    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_scalar(self, *_: object) -> None:
        pass


def board(rundir: RunDir, loggers: tuple[str, ...]) -> Any:
    """A TensorBoard writer when the recipe asks for one. Raises SurroundingsError when it is not installed."""
    if "tensorboard" not in loggers:
        return _Silent()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise SurroundingsError(
            "report.loggers names tensorboard, which is not installed: pip install 'eyas[tensorboard]'"
        ) from e
    return SummaryWriter(str(rundir / "train" / "tensorboard"))
