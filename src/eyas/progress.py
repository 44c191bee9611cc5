"""Progress on stderr: what, how far, how fast, how long still. One line that moves on a terminal, a line every few
seconds elsewhere."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType

PIPE_EVERY_S = 10.0
TERMINAL_EVERY_S = 0.3


_silent = False


def silence() -> None:
    """Say nothing from now on: another process speaks for this one."""
    global _silent
    _silent = True


def say(text: str) -> None:
    """One line to stderr, at once."""
    if not _silent:
        print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 05 s, 2 h 10 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min"


def size(n_bytes: float) -> str:
    """Bytes for people, in powers of ten as disks are sold: 828 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 999.5 or unit == "TB":
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def table(rows: Sequence[Sequence[str]], widest: int = 44) -> None:
    """Rows to stderr in columns, the first as a header; a longer cell is cut, which its dots show."""
    cut = [[c if len(c) <= widest else f"{c[: widest - 2]}…" for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cut) for i in range(len(cut[0]))]
    for row in cut:
        say("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


class Progress:
    """Counts `total` units of work; `rate_unit` (default: the same) is what the rate is quoted in."""

    def __init__(
        self, label: str, total: int, unit: str, rate_unit: str | None = None, done: int = 0
    ) -> None:
        self.label, self.total, self.unit, self.rate_unit = label, total, unit, rate_unit or unit
        self.done = self.first = done
        self.counted = 0
        self.started = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.note = ""
        self.reported = -1

    def __enter__(self) -> "Progress":
        return self

    def add(self, units: int, counted: int | None = None, note: str | None = None) -> None:
        self.done += units
        self.counted += units if counted is None else counted
        if note is not None:
            self.note = note
        now = time.monotonic()
        if now - self.shown >= (TERMINAL_EVERY_S if self.terminal else PIPE_EVERY_S):
            self.shown = now
            self._show(now, end="\r" if self.terminal else "\n")

    def _show(self, now: float, end: str) -> None:
        self.reported = self.done
        spent = max(now - self.started, 1e-6)
        new = self.done - self.first
        left = (
            f", {duration(spent / new * (self.total - self.done))} left"
            if new > 0 and self.done < self.total
            else ""
        )
        note = f", {self.note}" if self.note else ""
        line = (
            f"  {self.label}: {self.done:,}/{self.total:,} {self.unit}, "
            f"{self.counted / spent:,.4g} {self.rate_unit}/s{note}{left}"
        )
        if not _silent:
            print(line.ljust(100) if self.terminal else line, file=sys.stderr, end=end, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if kind is None and self.counted and (self.terminal or self.reported < self.done):
            self._show(time.monotonic(), end="\n")
        elif self.terminal:
            print(file=sys.stderr)
