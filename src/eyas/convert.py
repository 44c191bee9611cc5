"""A drafter in another dialect: the same weights, bit for bit, under the names and flags that mean the same there.

    eyas convert IN OUT --to vllm|sglang|speculators|eagle|modelopt [--engine-version V] [--target T]

Reads IN as eyas check does; writes OUT whole or not at all. What the dialect, or the engine in that version, cannot express is refused.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from eyas.causes import Finding
from eyas.check import engine_rules, rules
from eyas.drafter import dialects, facts
from eyas.drafter.facts import Facts
from eyas.errors import ContractError, UsageError
from eyas.progress import say
from eyas.stores import weights
from eyas.stores.weights import Part
from eyas.target import Target

ENGINES = {"vllm": "vllm", "sglang": "sglang", "speculators": "vllm"}  # that reads the dialect
ALONG = ("contract.json", "metrics.json", "trained_on.txt")
ALWAYS_MAPPED = ("sglang", "eagle")  # their trainers write d2t and t2d for a whole vocabulary too


def convert(source: Path, out: Path, to: str, version: str | None, target: Target | None) -> dict[str, Any]:
    """Write the drafter in `source` to the new folder `out`; returns what was read and written.

    Raises UsageError for an unknown dialect or an `out` that is there, ContractError for what cannot be read or expressed.
    """
    if to not in dialects.NAMES:
        raise UsageError(f"--to is {to}; known dialects: {', '.join(dialects.NAMES)}")
    if version and to not in ENGINES:
        raise UsageError(f"--engine-version: no engine of eyas's reads the dialect {to}")
    if out.exists():
        raise UsageError(f"{out} is there already; name a folder that is not")
    found = facts.gather(source, target)
    _refuse(
        [x for rule in rules.RULES for x in rule(found)],
        f"{source} has faults that a conversion would carry along",
    )
    model_type = found.contract.target_model_type if found.contract else target.model_type if target else None
    config = dialects.config_of(found.card, to, _about(found), model_type)
    work = out.with_name(out.name + ".new")
    shutil.rmtree(work, ignore_errors=True)
    try:
        _write(found, config, to, work)
        again = facts.gather(work, target)
        _same(found, again)
        engine = engine_rules.named(ENGINES[to], version) if to in ENGINES else None
        if engine:
            _refuse(list(engine_rules.findings(again, engine)), f"{engine.name} cannot express this drafter")
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"  {source} ({found.reading.dialect}: {found.reading.reason}) written as {to}: {out}")
    return {
        "from": found.reading.dialect,
        "to": to,
        "folder": str(out),
        "tensors": len(again.weights.tensors),
        "config": config,
    }


def _refuse(findings: list[Finding], why: str) -> None:
    bad = [x.message for x in findings if x.severity in ("error", "unknown")]
    if bad:
        raise ContractError(
            f"{why}: {'; '.join(bad[:6])}{f'; and {len(bad) - 6} more' if len(bad) > 6 else ''}"
        )


def _about(f: Facts) -> dict[str, Any]:
    """Keys that say nothing of the drafter's meaning."""
    out = {k: f.folder.flat[k] for k in dialects.TOKENS if k in f.folder.flat}
    if f.contract:
        stop = f.contract.stop_ids
        out["eos_token_id"] = stop[0] if len(stop) == 1 else list(stop)
    if f.target:
        names = f.target.config.get("architectures")
        out |= {
            "verifier": str(f.target.folder),
            "verifier_architectures": names if isinstance(names, list) else [],
        }
    return out


def _write(f: Facts, config: dict[str, Any], to: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    weights.write(folder / "model.safetensors", _tensors(f, to))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ALONG:
        if (f.path / name).is_file():
            shutil.copyfile(f.path / name, folder / name)


def _tensors(f: Facts, to: str) -> dict[str, Part]:
    """By their names in the dialect; the vocabulary map in the form that it has there."""
    held = {
        c: f.weights.tensors[disk] for c, disk in f.names.items() if not disk.startswith(dialects.NEVER_SAVED)
    }
    out: dict[str, Part] = {
        dialects.named(name, to): t for name, t in held.items() if name not in ("d2t", "t2d")
    }
    small, large = f.card["draft_vocab"].value, f.card["vocab"].value
    if small == large and to not in ALWAYS_MAPPED:
        return out  # vLLM 0.32 refuses a map of the whole vocabulary
    d2t = f.small["d2t"] if "d2t" in f.small else np.zeros(small, np.int64)
    marks = np.zeros(large, np.bool_)
    marks[np.arange(small) + d2t] = True
    out["d2t"] = held.get("d2t", d2t)
    if to != "modelopt":
        out["t2d"] = held.get("t2d", marks)
    return out


def _same(a: Facts, b: Facts) -> None:
    """Raises ContractError where what was written does not read as what was meant: a fault of eyas."""
    for name in engine_rules.COMPARED:
        mine, theirs = a.card[name], b.reading.card[name]
        if theirs.known and mine.known and mine.value != theirs.value and name != "map":
            raise ContractError(
                f"convert: {name} was {mine.value} and would read as {theirs.value} ({theirs.where})"
            )
