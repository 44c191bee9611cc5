"""The memory that plan predicts, against what was measured on a GPU."""

import importlib
import json
from pathlib import Path

import pytest

from eyas.drafter import memory
from tests.conftest import contract

ROOT = Path(__file__).parents[2]
MEASURED = [
    ("training-8b-h200.json", 1),
    ("training-kimi-h200.json", 1),
    ("training-kimi-16k-h200.json", 2),
]


@pytest.mark.parametrize(("name", "repeat"), MEASURED)
def test_predicted_peaks_are_within_a_tenth_of_measured_ones(name, repeat, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    training = importlib.import_module("training")
    cells = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))["cells"]
    mine = [c for c in cells if c["tool"] == "eyas"]
    assert mine
    for cell in mine:
        docs = training.documents(cell["cell"], repeat)
        keys, live = sum(n - 2 for n, _ in docs), sum(n - start - 1 for n, start in docs)
        contract = training.contract_of(cell["shape"], cell["ttt"])
        found = memory.of_training(contract, keys, live, cell["ttt"], batches=2)
        assert 0.9 < found.peak / cell["peak_bytes"] < 1.1, (cell["shape"], cell["cell"], cell["ttt"])


def test_more_of_anything_takes_more():
    base = memory.of_training(contract(), 100, 50, 3, 1).peak
    for more in ((200, 50, 3, 1), (100, 100, 3, 1), (100, 50, 5, 1), (100, 50, 3, 2)):
        assert memory.of_training(contract(), *more).peak > base
    large = (10**8, 10**8, 3, 1)  # beyond what is replayed
    assert memory.of_training(contract(), *large, size=4).peak > memory.of_training(contract(), *large).peak
