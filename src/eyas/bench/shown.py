"""What bench prints and keeps of its cells and rows."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eyas.bench.measure import Request
from eyas.progress import say
from eyas.rundir import RunDir, atomic


def write_parquet(rundir: RunDir, requests: Sequence[Request]) -> None:
    """bench/requests.parquet: every measured answer, raw."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic(rundir / "bench" / "requests.parquet") as tmp:
        pq.write_table(pa.Table.from_pylist([asdict(r) for r in requests]), tmp, compression="zstd")


def cell(cell: dict[str, Any]) -> None:
    """One line per load and k, and a second one where something is wrong with it."""
    s, out = cell["S"], cell.get("outputs")
    parts = [f"S {s['value']:.3f} [{s['low']:.3f}, {s['high']:.3f}]"]
    if cell["tau"]:
        replayed = f" (replayed {cell['tau_replayed']:.3f})" if cell.get("tau_replayed") else ""
        parts.append(f"tau {cell['tau']['value']:.3f}{replayed}")
    if cell["C"]:
        parts.append(f"C {cell['C']['value']:.3f}")
    if cell.get("throughput_tokens_per_s"):
        both = cell["throughput_tokens_per_s"]
        parts.append(f"{both['drafter']:.1f} tokens/s in all ({both['baseline']:.1f} without)")
    if out:
        unjudged = out.get("unstable", 0) + out.get("unjudged", 0)
        same = (
            f"{out['equal']} answers equal, {out['near_tie']} differ at near ties, {out['fault']} elsewhere"
        )
        parts.append(same + (f", {unjudged} cannot be judged" if unjudged else ""))
    load = f", {cell['concurrency']} at once" if cell["concurrency"] > 1 else ""
    say(f"  k={cell['k']}{load}: {'; '.join(parts)}")
    likely = (cell.get("sampled") or {}).get("unlikely")
    if likely:
        say(f"    sampled answers are not the target's: {likely}")
    if cell["refused"]:
        say(f"    refused: {cell['refused']}")
