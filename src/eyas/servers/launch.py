"""Start a server, wait until it answers as ours, and stop it.

    record ── start (own session, own log) ── watch the log, ask /health ── /v1/models lists our nonce ── ready

A server that dies, never answers, or turns out to be another's gives one message with what the log says, and is stopped.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from eyas import interrupt
from eyas.engines.vllm import Sign
from eyas.errors import SurroundingsError
from eyas.progress import duration, say
from eyas.servers import records
from eyas.servers.records import Record

POLL_S = 0.5
ASK_S = 5.0
READY_S = 1800.0
LAST_LINES = 12
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): \S.*")
SECOND_HAND = (
    "EngineDeadError",
    "See root cause above",
    "See stack trace",
)  # errors that only point at another


@dataclass(frozen=True)
class Launch:
    """A server to be started."""

    name: str
    nonce: str
    argv: list[str]
    env: dict[str, str]  # added to ours
    host: str
    port: int
    model: str
    log: Path
    engine: str
    phases: Sequence[Sign]
    faults: Sequence[Sign]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def shown(self) -> str:
        """The command, ready to paste."""
        words = [f"{k}={shlex.quote(v)}" for k, v in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])


def new_nonce() -> str:
    return f"eyas-{uuid.uuid4().hex[:12]}"


def free_port(host: str) -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def refuse_taken(host: str, port: int) -> None:
    """Raises SurroundingsError naming the process that listens on the port."""
    with socket.socket() as s:
        s.settimeout(ASK_S)
        if s.connect_ex((host, port)):
            return
    raise SurroundingsError(
        f"port {port} on {host} is taken by {_listener(port)}. Choose another with --port, or stop it yourself."
    )


def _listener(port: int) -> str:
    try:
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid:
                return f"process {c.pid} ({psutil.Process(c.pid).name()})"
    except psutil.Error:
        pass
    return "a process that eyas may not look at"


def start(launch: Launch, ready_s: float = READY_S) -> Record:
    """Start and wait until it is ready. On any failure, Ctrl-C included, all that was started is stopped.

    Raises SurroundingsError when it dies, does not get ready in time, or another server answers.
    """
    refuse_taken(launch.host, launch.port)
    if any(r.name == launch.name for r in records.every()):
        raise SurroundingsError(f'a server "{launch.name}" of eyas exists already: eyas stop {launch.name}')
    record = Record(
        launch.name, launch.nonce, launch.url, launch.model, str(launch.log), launch.argv, launch.engine, time.time(),
        records.me(),
    )  # fmt: skip
    records.write(record)
    try:
        process = _begin(launch)
        record = replace(record, session=process.pid)  # start_new_session: its pid is the session's id
        records.write(record)
        _wait(launch, process, ready_s)
    except BaseException:
        records.stop(record, grace_s=2.0)
        raise
    return record


def _begin(launch: Launch) -> subprocess.Popen:
    """Raises SurroundingsError where the program or the log cannot be opened."""
    try:
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("wb") as log:
            return subprocess.Popen(
                launch.argv, env={**os.environ, **launch.env, records.MARK: launch.nonce}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    except OSError as e:
        raise SurroundingsError(f"cannot start {launch.argv[0]}: {e.strerror} ({e.filename})") from e


def keep(record: Record) -> Record:
    """Let a server live on when this eyas ends, until `eyas stop`."""
    kept = replace(record, owner=None)
    records.write(kept)
    return kept


def _wait(launch: Launch, process: subprocess.Popen, ready_s: float) -> None:
    began = time.monotonic()
    said: set[str] = set()
    while True:
        interrupt.safe_place()
        text = launch.log.read_text(encoding="utf-8", errors="replace")
        for sign in launch.phases:
            if sign.text in text and sign.meaning not in said:
                said.add(sign.meaning)
                say(f"  {sign.meaning} ({duration(time.monotonic() - began)})")
        if process.poll() is not None:
            raise SurroundingsError(
                f"{launch.engine} ended with {process.returncode} while starting: {explain(launch)}"
            )
        if answers(launch.url) and _is_ours(launch):
            return
        if time.monotonic() - began > ready_s:
            raise SurroundingsError(
                f"{launch.engine} did not get ready in {duration(ready_s)}: {explain(launch)}"
            )
        time.sleep(POLL_S)


def answers(url: str) -> bool:
    """Whether a server says that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=ASK_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _is_ours(launch: Launch) -> bool:
    """Whether the server lists our nonce. Raises SurroundingsError when it answers and does not."""
    try:
        with urllib.request.urlopen(f"{launch.url}/v1/models", timeout=ASK_S) as reply:
            ids = [m["id"] for m in json.load(reply)["data"]]
    except (urllib.error.URLError, OSError):
        return False
    except (ValueError, KeyError, TypeError):
        ids = []
    if launch.nonce in ids:
        return True
    raise SurroundingsError(
        f"{launch.url} is answered by another server (its models: {', '.join(map(str, ids)) or 'none'}). Ours was stopped; "
        "choose another --port."
    )


def explain(launch: Launch) -> str:
    """What the log says: a known fault with what to do, the last error that is not about another one, or its last lines."""
    text = launch.log.read_text(encoding="utf-8", errors="replace")
    for sign in launch.faults:
        if sign.text in text:
            line = next(line for line in text.splitlines()[::-1] if sign.text in line)
            return f"{sign.meaning}. It said: {' '.join(line.split())[-300:]} (log: {launch.log})"
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.search(line) and not any(w in line for w in SECOND_HAND)]
    if errors:
        return f"it said: {ERROR.search(errors[-1]).group()[:300]} (log: {launch.log})"  # type: ignore[union-attr]
    last = "\n    ".join(lines[-LAST_LINES:])
    return (
        f"its last words (log: {launch.log}):\n    {last}"
        if last
        else f"it wrote nothing (log: {launch.log})"
    )
