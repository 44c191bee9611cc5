"""Answers and states of the embedded engine in memory, for what looks at some dozens of conversations (a probe), not at a run's.

with an engine of all layers that are wanted:  answered(engine, …) -> Said;  states_of(engine, said) -> RowStates
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import psutil
import torch

from eyas.engines.hf import HFEngine
from eyas.stores.states import RowStates
from eyas.target import Target

PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
AT_ONCE = 16  # conversations answered together
SHARE = 0.6  # of the free memory that a target's weights may take


class Said(NamedTuple):
    """A conversation: its ids, prompt and answer, and where the answer begins."""

    name: str
    ids: list[int]
    start: int


def too_large(target: Target, dtype: str, device: str) -> str | None:
    """Why the embedded engine cannot hold a target on this machine, or None."""
    stored = sum(os.path.getsize(p) for p in set(target.files.values()))
    need = stored * (2 if dtype == "float32" else 1)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if need <= SHARE * free:
        return None
    return f"the target's weights need {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free here"


def answered(engine: HFEngine, prompts: Sequence[tuple[str, list[int]]], max_tokens: int) -> list[Said]:
    """Greedy answers to prompts (name, ids); those without two tokens of answer are left out."""
    out = []
    ordered = sorted(prompts, key=lambda p: len(p[1]))
    for at in range(0, len(ordered), AT_ONCE):
        group = ordered[at : at + AT_ONCE]
        unused = [np.zeros(max_tokens)] * len(group)
        answers = engine.generate([ids for _, ids in group], max_tokens, [0.0] * len(group), 1.0, unused)
        out += [
            Said(name, ids + a.ids, len(ids))
            for (name, ids), a in zip(group, answers, strict=True)
            if len(a.ids) > 1
        ]
    return out


def states_of(
    engine: HFEngine, rows: Sequence[Said], dtype: torch.dtype | None = torch.bfloat16
) -> list[RowStates]:
    """States of the engine's layers for each conversation, on the CPU; aux states in dtype (bfloat16, as a run stores them), or as the
    engine computed them where it is None."""
    out: list[RowStates | None] = [None] * len(rows)
    batch: list[int] = []
    for i in [*sorted(range(len(rows)), key=lambda i: len(rows[i].ids)), None]:
        if batch and (i is None or (len(batch) + 1) * len(rows[i].ids) > PASS_TOKENS[engine.device]):
            seen = engine.states([rows[j].ids for j in batch])
            for place, j in enumerate(batch):
                n = len(rows[j].ids)
                aux = seen.aux_BTLD[place, :n]
                out[j] = RowStates(
                    rows[j].name, torch.tensor(rows[j].ids, dtype=torch.int32), (aux if dtype is None else aux.to(dtype)).cpu().clone(),
                    seen.last_BTD[place, :n].cpu().clone(), seen.top1_BT[place, :n].cpu().to(torch.int32), rows[j].start,
                )  # fmt: skip
            batch = []
        if i is not None:
            batch.append(i)
    return [r for r in out if r is not None]
