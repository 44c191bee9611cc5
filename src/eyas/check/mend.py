"""Mends where the mend is certain: a config that says other than the contract of the training, a vocabulary map that follows from t2d.

What was there stays beside it as NAME.before-fix. eyas check DIR --fix
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from eyas.check import rules, vocabulary
from eyas.drafter.facts import Facts
from eyas.rundir import atomic
from eyas.stores import weights

BEFORE = ".before-fix"


def mend(f: Facts) -> list[str]:
    """Do what is certain; returns what was done, one sentence each."""
    return [*_config(f), *_map(f)]


def _config(f: Facts) -> list[str]:
    made = dict(f.config)
    if f.contract is not None:
        made |= dict(rules.changed_keys(f))
    elif f.folder.flat.get("tie_word_embeddings") is True and "lm_head.weight" in f.names:
        made["tie_word_embeddings"] = False
        if isinstance(made.get("transformer_layer_config"), dict):
            made["transformer_layer_config"] = made["transformer_layer_config"] | {
                "tie_word_embeddings": False
            }
    changed = sorted(key for key in made if made[key] != f.config.get(key, ...))
    if not changed:
        return []
    path = f.path / "config.json"
    _keep(path)
    _json(path, made)
    return [f"{path}: {', '.join(changed)} corrected; what was there is {path.name}{BEFORE}"]


def _map(f: Facts) -> list[str]:
    d2t, t2d = f.small.get("d2t"), f.small.get("t2d")
    small, large = f.card["draft_vocab"].value, f.card["vocab"].value
    marked = np.flatnonzero(t2d) if t2d is not None else None
    if d2t is not None and (d2t.dtype.kind not in "iu" or not len(d2t)):
        return []
    wanted, why = None, ""
    if d2t is not None and vocabulary.absolute(d2t.astype(np.int64), t2d, large):
        wanted, why = d2t - np.arange(len(d2t)), "held absolute ids, and holds offsets"
    elif marked is not None and len(marked) == small and (d2t is None or not d2t.any()):
        wanted, why = marked - np.arange(len(marked)), "made from t2d"
    elif d2t is not None and d2t.dtype != np.int64:
        wanted, why = d2t, "written as int64"
    if wanted is None or (d2t is not None and d2t.dtype == np.int64 and np.array_equal(wanted, d2t)):
        return []
    disk = f.names.get("d2t", "d2t")
    held = f.weights.tensors
    path = held[disk].file if disk in held else next(iter(held.values())).file
    parts: dict[str, weights.Part] = {n: t for n, t in held.items() if t.file == path}
    with atomic(path.with_name(path.name + ".new")) as tmp:
        weights.write(tmp, parts | {disk: wanted.astype(np.int64)})
    _keep(path)
    path.with_name(path.name + ".new").replace(path)
    return [f"{path}: d2t {why}; what was there is {path.name}{BEFORE}"]


def _keep(path: Path) -> None:
    """The first state of a file, under another name."""
    kept = path.with_name(path.name + BEFORE)
    if kept.exists() or kept.is_symlink():
        return
    if path.is_symlink():  # as a download cache has it: the file that it names stays where it is
        kept.symlink_to(os.readlink(path))
    else:
        os.link(path, kept)


def _json(path: Path, value: dict[str, Any]) -> None:
    with atomic(path) as tmp:
        tmp.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
