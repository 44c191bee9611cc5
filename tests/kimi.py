"""The stand-in for Kimi-K2.5 (benchmarks/kimi_standin.py) with random weights, small enough for a test."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kimi_standin.py"


def standin(folder: Path, *words: str) -> Path:
    spec = importlib.util.spec_from_file_location("kimi_standin", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("kimi_standin", made)
    spec.loader.exec_module(made)
    made.main([str(folder), "--random", *words])
    return folder
