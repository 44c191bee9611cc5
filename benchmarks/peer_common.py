"""Helpers shared by the drivers of other EAGLE-3 trainers (peer_speculators.py, peer_specforge.py).

Shapes, the random draft-vocabulary map, the layout of documents in a batch, the command line and the
result lines. A "cell" is one measurement: {"name": ..., "ttt": K, "docs": [[length, start], ...]}.
Each document has `length` tokens, of which the positions [start, length) are supervised.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass

import torch

DISTINCT_BATCHES = 2


@dataclass(frozen=True)
class Shape:
    """Geometry of a one-layer drafter and of the target whose head and embedding it uses."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    target_layers: int
    norm_eps: float
    rope_theta: float


SHAPES = {
    "8B": Shape(4096, 14336, 32, 8, 128, 128256, 32000, 32, 1e-5, 500000.0),
    "Kimi": Shape(7168, 18432, 64, 64, 128, 163840, 32000, 61, 1e-6, 1000000.0),
    "SmolLM2": Shape(576, 1536, 9, 3, 64, 49152, 16384, 30, 1e-5, 100000.0),
    "tiny": Shape(128, 256, 4, 2, 32, 1024, 256, 12, 1e-6, 10000.0),
}


def argument_parser(description):
    """The options that both drivers have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--cells", required=True, help="a JSON list of cells, or @FILE that holds one")
    parser.add_argument("--out", required=True, help="file to which one JSON line a cell is appended")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dry", action="store_true", help="on the CPU, without compiling: checks, no timing")
    return parser


def read_cells(text):
    """Parse and check the cells; all must hold the same number of tokens."""
    if text.startswith("@"):
        with open(text[1:], encoding="utf-8") as file:
            text = file.read()
    cells = json.loads(text)
    for cell in cells:
        for length, start in cell["docs"]:
            if not 0 <= start < length:
                raise ValueError(f"cell {cell['name']}: document {length, start} supervises nothing")
    totals = {token_count(cell) for cell in cells}
    if len(totals) != 1:
        raise ValueError(f"the cells must hold the same number of tokens, not {sorted(totals)}")
    return cells


def token_count(cell):
    return sum(length for length, _ in cell["docs"])


def supervised_count(cell):
    return sum(length - start for length, start in cell["docs"])


def prepare_process(dry):
    """Set what must be set before the peers are imported; return the device."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if dry:
        torch.compiler.set_stance("force_eager")
        return "cpu"
    return "cuda"


def vocabulary_map(shape):
    """A random draft vocabulary: t2d (mask over the target's) and d2t (offsets of the draft's)."""
    generator = torch.Generator().manual_seed(2)
    kept = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
    target_to_draft = torch.zeros(shape.vocab, dtype=torch.bool)
    target_to_draft[kept] = True
    return target_to_draft, kept - torch.arange(shape.draft_vocab)


def packed_layout(docs):
    """Documents one after another: (document number, position in its document, supervised), each [tokens]."""
    number = torch.cat([torch.full((length,), i) for i, (length, _) in enumerate(docs)])
    position = torch.cat([torch.arange(length) for length, _ in docs])
    supervised = torch.cat([torch.arange(length) >= start for length, start in docs])
    return number, position, supervised


def padded_layout(docs):
    """One row a document, padded to the longest: (real, supervised), each [documents, longest]."""
    longest = max(length for length, _ in docs)
    column = torch.arange(longest)
    real = torch.stack([column < length for length, _ in docs])
    supervised = torch.stack([(column >= start) & (column < length) for length, start in docs])
    return real, supervised


def tensor_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak():
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes():
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def versions(packages):
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def base_record(tool, options, cell, optimizer):
    """What a result line holds whether or not the cell ran."""
    return {
        "tool": tool,
        "version": importlib.metadata.version(tool),
        "optimizer": optimizer,
        "shape": options.shape,
        "ttt": cell["ttt"],
        "cell": cell["name"],
        "docs": cell["docs"],
        "tokens": token_count(cell),
        "supervised": supervised_count(cell),
        "versions": versions(("torch", "triton", "transformers")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def report_parameters(model):
    """Print each parameter's shape, type and whether it is trained."""
    found = {name: [list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()}
    print("PARAMETERS", json.dumps(found), flush=True)


def run_cell(record, out, measure):
    """Call measure(), which returns the measured fields; append the line, failed or not. True if it ran."""
    began = time.time()
    try:
        record.update(measure())
        record["tokens_per_s"] = round(record["tokens"] / (record["step_ms"] / 1e3), 1)
    except Exception as error:  # whatever the peer raises is the result of this cell
        traceback.print_exc()
        record["error"] = f"{type(error).__name__}: {error}"[:500]
    record["cell_s"] = round(time.time() - began, 1)
    line = json.dumps(record)
    print("RESULT " + line, flush=True)
    with open(out, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    return "error" not in record
