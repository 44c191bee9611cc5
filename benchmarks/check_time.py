"""How long `eyas check` takes for a drafter of Kimi-K2.5's shape (2.4 GB), as a user runs it: the whole command, its imports included.

    python benchmarks/check_time.py [--rounds 5] [--folder DIR]

Makes the folder with random weights first (in page cache afterwards, as after a download). Writes docs/results/check-time.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from common import write

from eyas import contract
from eyas.contract import Contract, Norms
from eyas.drafter import dialects, shapes
from eyas.stores import weights

KIMI = Contract(
    target_model_type="kimi_k2", target_fingerprint="0" * 16, target_identity="random", target_layers=61, hidden=7168, mlp=18432,
    heads=64, kv_heads=64, head_dim=128, vocab=163840, draft_vocab=32000, eps=1e-6, rope_theta=50000.0, context=262144,
    trained_length=2048, aux_layers=(2, 30, 58), norms=Norms(False, "none", False), ttt_steps=7, stop_ids=(163586,),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make it (default: a temporary folder)")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        size = make(Path(folder))
        words = [sys.executable, "-m", "eyas", "check", folder, "--engine", "vllm", "--json"]
        seconds = []
        for _ in range(a.rounds):
            began = time.perf_counter()
            done = subprocess.run(words, capture_output=True, text=True)
            seconds.append(time.perf_counter() - began)
            if done.returncode:
                raise SystemExit(done.stderr)
    print(
        f"{size / 1e9:.2f} GB: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    )
    write("check-time", {"bytes": size, "seconds": seconds, "median_s": statistics.median(seconds)})


def make(folder: Path) -> int:
    """A healthy folder of that shape; returns the bytes of its weights."""
    rng = np.random.default_rng(0)
    block = rng.integers(0x3C00, 0x3F80, 1 << 20, dtype=np.uint16)  # bfloat16 between 0.0078 and 1
    raw = {
        n: (np.resize(block, s) if n not in ("d2t", "t2d") else None, s)
        for n, s in shapes.of_contract(KIMI).items()
    }
    kept = np.arange(KIMI.draft_vocab)
    kept[-1] = KIMI.stop_ids[0]
    marks = np.zeros(KIMI.vocab, np.bool_)
    marks[kept] = True
    parts: dict[str, np.ndarray] = {"d2t": kept - np.arange(len(kept)), "t2d": marks}
    parts |= {n: v for n, (v, _) in raw.items() if v is not None}
    path = folder / "model.safetensors"
    weights.write(path, parts, {n: "BF16" for n in raw if n not in ("d2t", "t2d")})
    config = dialects.config_of(
        contract.card(KIMI), "vllm", {"eos_token_id": KIMI.stop_ids[0]}, KIMI.target_model_type
    )
    (folder / "config.json").write_text(json.dumps(config))
    KIMI.write(folder / "contract.json")
    return path.stat().st_size


if __name__ == "__main__":
    main()
