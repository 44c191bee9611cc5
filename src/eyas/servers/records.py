"""Which servers are ours: one record each, and every process of theirs carries the record's nonce in its environment.

    $XDG_STATE_HOME/eyas/servers/NAME.json      default ~/.local/state

A record is written before its server is started, so that a killed eyas leaves no server without one. A process is ours iff its
environment holds EYAS_SERVER=nonce: ports, names and process ids are reused by others, a nonce is not. Engines overwrite the
environment of their workers with a title (VLLM::Worker): such a process, which shows no environment at all, is ours iff it is
in the session that the server was started in.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from eyas.engines import containers
from eyas.errors import UsageError
from eyas.rundir import write_json

MARK = "EYAS_SERVER"
GRACE_S = 20.0


@dataclass(frozen=True)
class Record:
    name: str
    nonce: str
    url: str
    model: str  # name to ask for
    log: str
    command: list[str]
    engine: str
    started: float  # seconds since the epoch
    owner: list[float] | None  # (pid, start time) of the eyas that will stop it; None: until `eyas stop`
    session: int | None = None  # session id of the server, once it is started


def folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "eyas" / "servers"


def me() -> list[float]:
    return [os.getpid(), psutil.Process().create_time()]


def write(record: Record) -> None:
    write_json(folder() / f"{record.name}.json", asdict(record))


def every() -> list[Record]:
    """All records, oldest first; a file that is none is left alone."""
    out = []
    for path in sorted(folder().glob("*.json")) if folder().is_dir() else []:
        try:
            out.append(Record(**json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, TypeError, OSError):
            continue
    return sorted(out, key=lambda r: r.started)


def named(name: str) -> Record:
    """Raises UsageError with the names that there are."""
    known = every()
    for record in known:
        if record.name == name:
            return record
    names = ", ".join(r.name for r in known) or "none"
    raise UsageError(f'no server "{name}" of eyas; there is: {names}')


def members(record: Record) -> list[psutil.Process]:
    """Every living process of a server."""
    out = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _is_of(process, record):
                out.append(process)
        except (psutil.Error, OSError):
            continue  # another user's, or gone
    return out


def _is_of(process: psutil.Process, record: Record) -> bool:
    environment = process.environ()
    if environment.get(MARK) == record.nonce:
        return True
    overwritten = MARK not in environment and "PATH" not in environment
    return overwritten and record.session is not None and os.getsid(process.pid) == record.session


def stop(record: Record, grace_s: float = GRACE_S) -> int:
    """Stop all processes of a server, first politely; returns how many there were. Its record goes last."""
    found = members(record)
    containers.remove(record.command, record.nonce)
    _signal(members(record), polite=True)
    deadline = time.monotonic() + grace_s
    left = members(record)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = members(record)
    while left:
        _signal(left, polite=False)
        time.sleep(0.1)
        left = members(record)
    (folder() / f"{record.name}.json").unlink(missing_ok=True)
    return len(found)


def _signal(processes: list[psutil.Process], polite: bool) -> None:
    for process in processes:
        try:
            if polite:
                process.terminate()
            else:
                process.kill()
        except psutil.NoSuchProcess:
            continue


def alive(owner: list[float]) -> bool:
    try:
        return psutil.Process(int(owner[0])).create_time() == owner[1]
    except psutil.Error:
        return False


def sweep() -> list[Record]:
    """Stop servers whose eyas was killed, and forget those that have ended; returns what was stopped."""
    stopped = []
    for record in every():
        if record.owner and not alive(record.owner):
            if stop(record):
                stopped.append(record)
        elif not record.owner and not members(record):
            (folder() / f"{record.name}.json").unlink(missing_ok=True)
    return stopped


def shown(record: Record) -> dict[str, Any]:
    """What `eyas ps` says of a server."""
    processes = members(record)
    memory = 0
    for p in processes:
        try:
            memory += p.memory_info().rss
        except psutil.Error:
            continue
    return {
        "name": record.name,
        "url": record.url,
        "model": record.model,
        "engine": record.engine,
        "processes": len(processes),
        "memory_bytes": memory,
        "seconds": time.time() - record.started,
        "log": record.log,
    }
