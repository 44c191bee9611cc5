"""Products of a weight with few rows (drafter/linear.py) against nn.Linear: what verifying k drafts costs over a plain step.

    python benchmarks/few_rows.py [--rounds 15]

SmolLM2-135M's shapes, float32. Writes docs/results/few-rows.json: milliseconds (median), and the ratio to nn.Linear's one row.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import RESULTS
from torch import nn

from eyas import __version__
from eyas.drafter.linear import Linear, swap
from eyas.pipeline import machine

SHAPES = {
    "head": (49152, 576, 1),
    "gate, up": (1536, 576, 20),
    "down": (576, 1536, 20),
    "q, o": (576, 576, 20),
}
ROWS = (1, 2, 3, 4, 5, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    table: dict[str, dict[str, dict[int, float]]] = {}
    print(f"{'ms':<12}{'':<11}" + "".join(f"{f'{m} rows':>9}" for m in ROWS))
    for name, (outer, inner, copies) in SHAPES.items():
        plain = [nn.Linear(inner, outer, bias=False) for _ in range(copies)]
        swapped = [Linear(inner, outer, bias=False) for _ in range(copies)]
        swap(nn.ModuleList(swapped))
        table[name] = measured({"nn.Linear": plain, "eyas": swapped}, inner, a.rounds)
        for word, row in table[name].items():
            print(f"{name:<12}{word:<11}" + "".join(f"{row[m]:>9.3f}" for m in ROWS))
    body = {
        "benchmark": "few-rows",
        "milliseconds": table,
        "settings": vars(a) | {"threads": torch.get_num_threads()},
    }
    body |= {"eyas": __version__, "machine": machine(), "date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "few-rows.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def measured(work: dict[str, list[nn.Linear]], inner: int, rounds: int) -> dict[str, dict[int, float]]:
    """Median milliseconds of one product, several weights in turn so that none stays in a cache, interleaved."""
    out: dict[str, dict[int, float]] = {name: {} for name in work}
    for m in ROWS:
        x = torch.randn(m, inner)
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(rounds):
            for name, layers in work.items():
                began = time.perf_counter()
                for layer in layers:
                    layer(x)
                times[name].append((time.perf_counter() - began) / len(layers) * 1e3)
        for name, values in times.items():
            out[name][m] = statistics.median(values)
    return out


if __name__ == "__main__":
    main()
