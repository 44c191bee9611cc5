"""Steps that changed no weight, since their loss was not finite or far above what it was: a few are passed over, more stop training."""

import math
from pathlib import Path
from typing import Any

from eyas.errors import ContractError
from eyas.progress import say
from eyas.train.updates import SPIKE

IN_A_ROW = 5
SHARE = 0.02  # of all steps; as many as IN_A_ROW are always allowed


class Skips:
    """Counts them. `state` goes into the training state. epoch_steps: of the shortest epoch, which must not be skipped as a whole."""

    def __init__(
        self, log: Path, total_steps: int, epoch_steps: int, state: dict[str, int] | None = None
    ) -> None:
        self.log, self.allowed = log, max(IN_A_ROW, math.ceil(SHARE * total_steps))
        self.in_a_row = min(IN_A_ROW, epoch_steps)
        self.state = state or {"count": 0, "in_a_row": 0}

    def passed(self) -> None:
        self.state["in_a_row"] = 0

    def skipped(self, record: dict[str, Any], usual: float, rows: list[str]) -> dict[str, Any]:
        """The line of steps.jsonl: the record with the reason and the rows. Raises ContractError when these are too many."""
        loss, norm = record["loss"], record["grad_norm"]
        if not math.isfinite(loss):
            why = "its loss is not finite"
        elif not math.isfinite(norm):
            why = "its gradient is not finite"
        else:
            why = f"its loss, {loss:.3f}, is above {SPIKE} times the usual {usual:.3f}"
        self.state["count"] += 1
        self.state["in_a_row"] += 1
        named = ", ".join(rows[:3]) + (", …" if len(rows) > 3 else "")
        say(f"  step {record['step']} skipped: {why} (rows {named})")
        if self.state["in_a_row"] >= self.in_a_row or self.state["count"] > self.allowed:
            many = (
                f"{self.in_a_row} steps in a row were skipped"
                if self.state["in_a_row"] >= self.in_a_row
                else f"{self.state['count']} steps were skipped, more than {self.allowed}"
            )
            raise ContractError(
                f"train: {many}. The last is step {record['step']}: {why} (rows {named}). They changed no weight, and the last good state is "
                f"kept; {self.log} names the rows of those before. Lower train.lr, or look at these rows."
            )
        finite = {n: record[n] if math.isfinite(record[n]) else None for n in ("loss", "grad_norm")}
        return record | finite | {"skipped": why, "rows": rows}
