"""The run folder: where each artifact lies, how it is written, and what it was made from.

    recipe.yaml  resolved.json (value, source, reason)  run.json (stages, versions, seconds, rates)
    plan.json  profile.json (eyas plan --profile)  profile/
    conversations/part-*.parquet manifest.json quarantine.jsonl
    states/shard-*.safetensors manifest.json
    train/steps.jsonl  train/state/  train/evals.jsonl  train/manifest.json
    drafter/{epoch-N,best}/ config.json model.safetensors contract.json metrics.json
    check.json  bench/requests.parquet  bench.json  verdict.json  report.html

A manifest is written last, so its existence means that its stage is complete. It names its inputs
({"generate.max_tokens": 160, "target": "sha256…"}); when the recipe now names others, the artifact is stale.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import StaleError, SurroundingsError, UsageError

FORMAT = 5  # 5: conversations have thoughts, calls, tools and flags; 4: extract says how its states came; 3: cells have a load, conversations a text; 2: train names its parent, conversations their prompt keys
TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # as tempfile names them, with our prefix


def fingerprint(value: Any) -> str:
    """A short stable hash of anything that JSON can say (sorted keys), or of bytes."""
    data = (
        value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    )
    return hashlib.sha256(data).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """sha256 of a whole file, hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary file beside `path`; on success it is fsynced and renamed over `path`.

    Raises SurroundingsError when the disk is full or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    except OSError as e:
        raise SurroundingsError(
            f"cannot write {path}: {e.strerror}. Free space, or choose another --run folder."
        ) from e
    tmp = Path(name)
    try:
        yield tmp
        with tmp.open("rb") as f:
            os.fsync(f.fileno())
        tmp.chmod(0o644)
        tmp.replace(path)
    except OSError as e:
        raise SurroundingsError(
            f"cannot write {path}: {e.strerror}. Free space, or choose another --run folder; what was finished is kept."
        ) from e
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as tmp:
        tmp.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises UsageError where the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UsageError(f"{path} is not there") from e
    except (ValueError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not valid JSON: {e}. Remove it and run its stage again.") from e


class Output(NamedTuple):
    """Where a stage leaves its work: the manifest, and all that goes when the stage is redone."""

    manifest: str
    paths: tuple[str, ...]


OUTPUTS = {
    "plan": Output("plan.json", ("plan.json",)),
    "generate": Output("conversations/manifest.json", ("conversations",)),
    "extract": Output("states/manifest.json", ("states",)),
    "train": Output("train/manifest.json", ("train", "drafter")),
    "check": Output("check.json", ("check.json",)),
    "bench": Output("bench.json", ("bench.json", "bench")),
    "verdict": Output("verdict.json", ("verdict.json",)),
    "report": Output("report.html", ("report.html",)),
}


class RunDir:
    """One run folder. Stages read inputs and write manifests through it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    def manifest(self, stage: str) -> dict[str, Any]:
        """The manifest of a finished stage. Raises UsageError when it has not finished, or another version wrote it."""
        path = self.root / OUTPUTS[stage].manifest
        if not path.is_file():
            raise UsageError(
                f'{self.root}: stage "{stage}" has not finished. Run "eyas {stage} {self.root}" first.'
            )
        manifest = read_json(path)
        if manifest.get("format") != FORMAT:
            raise UsageError(
                f"{path} was written by another version of eyas (format {manifest.get('format')}, this one has {FORMAT}). "
                f"Begin anew with --from plan, or choose another --run folder."
            )
        return manifest

    def finished(self, stage: str) -> bool:
        return (self.root / OUTPUTS[stage].manifest).is_file()

    def finish(self, stage: str, body: dict[str, Any]) -> dict[str, Any]:
        """Write a stage's manifest: the figures in `body`, the inputs, and a fingerprint over both."""
        inputs = self.record(stage)["inputs"]
        manifest = {"stage": stage, "format": FORMAT, "inputs": inputs, **body}
        manifest["fingerprint"] = fingerprint({"inputs": inputs, "content": body.get("content")})
        write_json(self.root / OUTPUTS[stage].manifest, manifest)
        return manifest

    def record(self, stage: str) -> dict[str, Any]:
        path = self.root / "run.json"
        return read_json(path)["stages"].get(stage, {}) if path.is_file() else {}

    def update_record(self, stage: str, **fields: Any) -> None:
        path = self.root / "run.json"
        run = read_json(path) if path.is_file() else {"stages": {}}
        run["stages"].setdefault(stage, {}).update(fields)
        write_json(path, run)

    def clear(self, stage: str) -> None:
        """Remove what a stage left, manifest first, so that a kill in between leaves it unfinished, not half-true."""
        (self.root / OUTPUTS[stage].manifest).unlink(missing_ok=True)
        for name in OUTPUTS[stage].paths:
            path = self.root / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def reopen(self, stage: str) -> None:
        """Take a stage's manifest away, so that it goes on with what it left."""
        (self.root / OUTPUTS[stage].manifest).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the temporary files and folders that a killed run left (call it under the lock)."""
        for path in sorted(self.root.rglob(".*"), reverse=True):
            if TEMPORARY.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def started(self, stage: str) -> bool:
        """Whether anything of this stage is there."""
        return any((self.root / name).exists() for name in OUTPUTS[stage].paths)

    def differences(self, stage: str, wanted: dict[str, Any]) -> dict[str, str]:
        """Why what is there is stale: by input that differs, a phrase; empty when it is fresh or not begun."""
        if not self.started(stage):
            return {}
        have = (
            self.manifest(stage)["inputs"] if self.finished(stage) else self.record(stage).get("inputs", {})
        )
        names = sorted(have.keys() | wanted.keys())
        return {
            n: f"{n} was {have.get(n, 'absent')!r:.60}, is now {wanted.get(n, 'absent')!r:.60}"
            for n in names
            if have.get(n) != wanted.get(n)
        }

    def refuse_stale(self, stage: str, differences: list[str]) -> None:
        raise StaleError(
            f'{self.root}: the artifacts of stage "{stage}" were made from other inputs: {"; ".join(differences)}. '
            f'Redo it and what follows with "eyas run {self.root} --from {stage}" (they are replaced), restore the '
            "old value, or start another folder with --run DIR."
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process writes a run folder at a time. Raises SurroundingsError naming the other one."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            handle = (self.root / ".lock").open("a+")
        except OSError as e:
            raise SurroundingsError(
                f"cannot write into {self.root}: {e.strerror}. Choose another folder with --run DIR."
            ) from e
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                handle.seek(0)
                owner = handle.read().strip() or "unknown"
                raise SurroundingsError(
                    f"{self.root} is in use by process {owner}. Wait for it, stop it, or choose another --run DIR."
                ) from e
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield
