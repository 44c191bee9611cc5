"""What the parity probe finds: drafters of eyas's own trainer in every dialect, whole, and broken one axis at a time.

    python benchmarks/probe.py TARGET DRAFTER [DRAFTER …] [--on CONVERSATIONS] [--conversations 48]

Every DRAFTER (a folder that eyas trained for TARGET) is probed as somebody else's, without eyas's contract: converted to each dialect that
has words for it, and with each fault planted in vLLM's. The answers are the same for all: the target's own, written now or held out in
CONVERSATIONS. Writes docs/results/probe.json.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from common import write

from eyas import outside
from eyas import target as targets
from eyas.check import probing
from eyas.convert import convert
from eyas.drafter import dialects, facts, opening, probe
from eyas.drafter.dialects import IDS
from eyas.engines import hf
from eyas.errors import ContractError
from eyas.stores import weights
from eyas.target import Target


@dataclass
class Fault:
    """axis: that it breaks. config, tensors: edits, in place; says: whether a drafter can have the fault at all."""

    name: str
    axis: str
    config: Callable[[dict], object] = lambda c: None
    tensors: Callable[[dict], object] = lambda t: None
    says: Callable[[dict], bool] = lambda c: True


def shifted(by: int) -> Callable[[dict], object]:
    return lambda c: c.update({IDS: [i + by for i in c[IDS]], "eagle_config": None})


def flipped(key: str) -> Callable[[dict], object]:
    return lambda c: c.update({key: not c[key]})


def normless(c: dict) -> None:
    c.update(fc_norm=False, norm_before_fc=False)


def without_norms(t: dict) -> None:
    for name in [n for n in t if n.startswith(("fc_norm", "input_norm"))]:
        t.pop(name)


def absolute(t: dict) -> None:
    held = values(t, "d2t")
    t["d2t"] = held + np.arange(len(held))
    t.pop("t2d")


def rebuilt(t: dict) -> None:
    """A map of other ids, as another tokenization of another data set gives: every fourth of the kept ids is exchanged for its neighbour."""
    held = values(t, "d2t")
    kept = held + np.arange(len(held))
    left = np.setdiff1d(np.arange(len(values(t, "t2d"))), kept)
    kept[::4] = left[: len(kept[::4])]
    kept = np.sort(kept)
    t["d2t"] = kept - np.arange(len(kept))
    t.pop("t2d")


def values(t: dict, name: str) -> np.ndarray:
    stored = t[name]
    return weights.of_file(stored.file).values(name)


FAULTS = (
    Fault("layers one later", "layers", shifted(1)),
    Fault("layers one earlier", "layers", shifted(-1)),
    Fault("residual flipped", "before_residual", flipped("norm_before_residual")),
    Fault("output flipped", "fed_back", flipped("norm_output")),
    Fault("rope_theta left out", "rope", lambda c: c.pop("rope_theta")),
    Fault("rope_theta 1e6", "rope", lambda c: c.update(rope_theta=1e6)),
    Fault("rope_theta 1e7", "rope", lambda c: c.update(rope_theta=1e7)),
    Fault("rope scaled by 8", "rope", lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 8.0})),
    Fault("map of ids", "map", tensors=absolute),
    Fault("map rebuilt", "map", tensors=rebuilt),
    Fault("norms before fc lost", "fc_norm", normless, without_norms, lambda c: c["fc_norm"] or c["norm_before_fc"]),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("drafters", nargs="+", type=Path)
    parser.add_argument("--on", type=Path, help="conversations of the target")
    parser.add_argument("--conversations", type=int, default=probing.CONVERSATIONS)
    a = parser.parse_args()
    target = targets.load(a.target)
    device = hf.choose_device().value
    first = opening.read(facts.gather(a.drafters[0], target), target)
    began = time.perf_counter()
    rows, origin = probing.rows(
        first.drafter.contract.aux_layers, target, a.on, outside.held_out_prompts, probing.Place(), device
    )
    rows = rows._replace(rows=rows.rows[: a.conversations])
    tokens = sum(map(len, rows.rows))
    print(
        f"{origin}: {len(rows.rows)} of them, {tokens:,} tokens, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for source in a.drafters:
            plain = bare(source, Path(folder) / f"{len(out)}-plain")
            norms = facts.gather(source, target).card
            name = f"{source.parent.parent.name if source.name == 'best' else source.name}"
            kind = f"residual normed {norms['before_residual'].value}, fc {norms['fc_norm'].value}, feeds back {norms['fed_back'].value}"
            for dialect in dialects.NAMES:
                made = Path(folder) / f"{len(out)}-{dialect}"
                try:
                    convert(plain, made, dialect, None, target)
                except ContractError as e:
                    out.append(
                        {
                            "drafter": name,
                            "kind": kind,
                            "case": dialect,
                            "broken": None,
                            "refused": str(e)[:200],
                        }
                    )
                    continue
                out.append(
                    {"drafter": name, "kind": kind, "case": dialect, "broken": None}
                    | probed(made, target, rows, device)
                )
                show(out[-1])
            for fault in FAULTS:
                config = json.loads((plain / "config.json").read_text())
                if not fault.says(config):
                    continue
                made = broken(plain, Path(folder) / f"{len(out)}-broken", fault)
                out.append(
                    {"drafter": name, "kind": kind, "case": fault.name, "broken": fault.axis}
                    | probed(made, target, rows, device)
                )
                show(out[-1])
    ran = [r for r in out if "differs" in r]
    whole, hurt = [[r for r in ran if (r["broken"] is None) == w] for w in (True, False)]
    summary = {
        "healthy": len(whole), "healthy_with_alarm": sum(bool(r["alarms"]) for r in whole), "broken": len(hurt),
        "found": sum(r["broken"] in r["differs"] for r in hurt), "undetermined": sum(r["broken"] in r["undetermined"] for r in hurt),
        "other_alarms": sum(bool(set(r["differs"]) - {r["broken"]}) for r in hurt),
    }  # fmt: skip
    print(summary, flush=True)
    settings = {
        "target": target.identity,
        "device": device,
        "conversations": len(rows.rows),
        "tokens": tokens,
    }
    write("probe", {"rows": out, "summary": summary, "settings": settings})


def bare(source: Path, out: Path) -> Path:
    """The drafter without eyas's contract and notes."""
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, out / name)
    return out


def broken(source: Path, out: Path, fault: Fault) -> Path:
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    fault.config(config)
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    tensors = dict(weights.opened(source).tensors)
    before = dict(tensors)
    fault.tensors(tensors)
    if tensors != before:
        weights.write(out / "model.safetensors", tensors)
    return out


def probed(folder: Path, target: Target, rows: probe.Rows, device: str) -> dict:
    began = time.perf_counter()
    f = facts.gather(folder, target)
    open_ = opening.assumed(f.card, target)
    found = probe.run(opening.read(f, target, open_), rows, target, device)
    of = lambda state: [x.name for x in found.axes if x.state == state]  # noqa: E731
    return {
        "differs": of("differs"), "undetermined": of("undetermined"), "open": sorted(open_),
        "alarms": [n for n in of("differs") if (n not in open_ and n != "layers") or (n == "layers" and "aux_layers" not in open_)],
        "sentences": [probe.sentence(x) for x in found.axes if x.state == "differs"], "tau_stated": found.tau_stated.value,
        "tau_found": found.tau_found.value, "pairs": found.pairs, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def show(r: dict) -> None:
    said = "; ".join(r["sentences"])[:150] or "nothing"
    print(
        f"{r['drafter']:<22} {r['case']:<22} tau {r['tau_stated']:.2f} -> {r['tau_found']:.2f} {r['seconds']:4.0f} s  {said}"
        f"{'  undetermined: ' + ', '.join(r['undetermined']) if r['undetermined'] else ''}",
        flush=True,
    )


if __name__ == "__main__":
    main()
