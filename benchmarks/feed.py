"""How fast the store feeds training: shards of made-up states in the page cache, to batches where training reads them.

    python benchmarks/feed.py [--hidden 7168] [--gigabytes 4] [--dtype bfloat16 fp8] [--threads 2]

Rows are read in the order of an epoch, packed as a step's batches, and copied: on a GPU into pinned memory and on to the device, made
ahead on a thread as training does; elsewhere into one tensor. Gigabytes are of states as they lie on the disk. Writes
docs/results/feed.json.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import write

from eyas.drafter.batch import pack
from eyas.feed import ahead
from eyas.stores import states
from eyas.stores.states import RowRef, RowStates
from eyas.train import schedule

LENGTHS = (500, 3500)  # of rows, half of each supervised
SHARD = 2**28
STEP = 16384  # tokens of a batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "fp8"), default=["bfloat16", "fp8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {}
    for dtype in a.dtype:
        with tempfile.TemporaryDirectory() as folder:
            refs = made(Path(folder), a.hidden, a.gigabytes * 1e9, dtype)
            size = states.bytes_of(refs)
            seconds = [epoch(refs, device, seed) for seed in range(a.rounds + 1)][1:]
        rates = [size / s / 1e9 for s in seconds]
        rows[dtype] = {"bytes": size, "tokens": sum(map(len, refs)), "gigabytes_per_s": rates}
        print(
            f"{dtype:<10}{size / 1e9:>6.1f} GB  {statistics.median(rates):>6.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})  "
            f"{rows[dtype]['tokens'] / statistics.median(seconds):>10,.0f} tokens/s"
        )
    write("feed", {"rows": rows, "settings": vars(a) | {"device": device}})


def made(folder: Path, hidden: int, size: float, dtype: str) -> list[RowRef]:
    """Rows of random states, in shards of the usual size."""
    g = torch.Generator().manual_seed(0)
    out: list[RowRef] = []
    total = number = 0
    while total < size:
        rows: list[RowStates] = []
        held = 0
        while held < SHARD:
            n = int(torch.randint(*LENGTHS, (1,), generator=g))
            ids = torch.zeros(n, dtype=torch.int32)
            aux = torch.randn(n, 3, hidden, generator=g).bfloat16()
            last = torch.randn(n, hidden, generator=g).bfloat16()
            rows.append(RowStates(f"{number}-{len(rows)}", ids, aux, last, ids, n // 2))
            held += 7 * n * hidden  # aux states, and last states of the half that is supervised
        path = folder / f"shard-{number:05d}.safetensors"
        states.write_shard(path, rows, {}, dtype == "fp8")
        total += path.stat().st_size
        out += states.rows_of(path)
        number += 1
    for path in {r.path for r in out}:
        path.read_bytes()  # into the page cache
    return out


def epoch(refs: list[RowRef], device: str, seed: int) -> float:
    """Seconds to make every batch of one epoch."""
    lengths = [len(r) for r in refs]
    groups = [
        group
        for step in schedule.epoch_steps(lengths, STEP, seed, 0)
        for group in schedule.micro_batches(step, lengths, STEP, padded=False)
    ]
    began = time.perf_counter()
    tensors = (lambda batch: batch.tensors()) if device == "cuda" else None
    for _ in ahead(groups, lambda group: pack([refs[i].load() for i in group], device, 5), tensors):
        pass
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
