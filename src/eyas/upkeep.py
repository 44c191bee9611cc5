"""What exists already: where a run stands, what can be removed, and a recipe to begin with.

eyas status RUN      eyas clean RUN      eyas init --target DIR
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eyas import pipeline, recipe
from eyas.commandline import Served
from eyas.errors import UsageError
from eyas.progress import duration, size
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.target import Target


class Standing(NamedTuple):
    """One stage of a run: done, stale, begun, missing; when it took how long, and why it is stale."""

    stage: str
    state: str
    seconds: float | None
    note: str


def status(resolved: Resolved, rundir: RunDir) -> list[Standing]:
    """Where each stage stands against the recipe, without running anything."""
    out: list[Standing] = []
    for stage in pipeline.STAGES:
        record = rundir.record(stage.name)
        seconds = record.get("seconds")
        missing = [n for n in stage.needs if not rundir.finished(n)]
        if missing:
            out.append(Standing(stage.name, "missing", None, f"waits for {missing[0]}"))
            continue
        differences = pipeline.stale(stage, resolved, rundir)
        if differences:
            goes_on = stage.costly and not pipeline.refused(stage, resolved, rundir)
            note = "keeps what is still wanted: " if goes_on else ""
            out.append(Standing(stage.name, "stale", seconds, note + "; ".join(differences)))
        elif rundir.finished(stage.name):
            out.append(Standing(stage.name, "done", seconds, ""))
        else:
            begun = rundir.started(stage.name)
            note = f"goes on with: eyas run {rundir.root}" if begun else ""
            out.append(Standing(stage.name, "begun" if begun else "missing", None, note))
    return out


def show_status(rows: list[Standing]) -> list[str]:
    return [
        f"{r.stage:<9} {r.state:<8} {duration(r.seconds) if r.seconds is not None else '':<12} {r.note}".rstrip()
        for r in rows
    ]


class Removable(NamedTuple):
    """Something that can go: its files, its size, and what then has to be made again."""

    what: str
    paths: list[Path]
    bytes: int
    cost: str


def removable(rundir: RunDir) -> list[Removable]:
    """What can go from a finished run: states, all drafters but the best, the training state. Records and best stay."""
    root = rundir.root
    groups = [
        (
            "states",
            sorted((root / "states").glob("shard-*")) if rundir.finished("train") else [],
            "training again needs extract again (--from extract)",
        ),
        (
            "drafters of other epochs",
            sorted((root / "drafter").glob("epoch-*")) if rundir.finished("train") else [],
            "drafter/best stays; the others can only be trained again",
        ),
        (
            "training state",
            [p for p in [root / "train" / "state"] if p.is_dir() and rundir.finished("train")],
            "this training cannot be continued",
        ),
    ]
    return [Removable(what, paths, sum(map(_size, paths)), cost) for what, paths, cost in groups if paths]


def remove(things: list[Removable]) -> int:
    """Remove them; returns the bytes freed. Only paths that removable() named."""
    for thing in things:
        for path in thing.paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return sum(t.bytes for t in things)


def _size(path: Path) -> int:
    return (
        sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        if path.is_dir()
        else path.stat().st_size
    )


def show_removable(things: list[Removable]) -> list[str]:
    return [f"{size(t.bytes):>8}  {t.what} ({t.cost})" for t in things]


def new_recipe(target: Target, name: str, served: Served | None = None) -> str:
    """A commented recipe for this target and machine: every key with its default, unit and reason; served: how the target is served now."""
    from eyas.engines import hf

    device = hf.choose_device()
    dtype = hf.choose_dtype("auto", device.value)
    layers = target.default_aux_layers()
    lines = [
        f"# A recipe for {target.identity}: {target.model_type}, {target.layers} layers, width {target.hidden}.",
        f"# On this machine ({device.value}: {device.reason}) auto means dtype {dtype.value}, since {dtype.reason};",
        f"# aux layers {layers.value}: {layers.reason}.",
        "# Every key stands here with its default; delete what you do not change. First: eyas run THIS_FILE --until plan",
        f"name: {name}",
    ]
    stated = _as_served(served) if served else {}
    section = ""
    units = recipe.units()
    for key, field in _sections_last(recipe.fields(recipe.Recipe)):
        if key == "name" or key == "target.facts":
            continue
        parent, _, last = key.rpartition(".")
        if parent != section:
            depth = parent.count(".")
            lines.append(f"{'  ' * depth}{parent.rpartition('.')[2]}:")
            section = parent
        value = stated.get(key, _default(field))
        value = str(target.folder) if key == "target.model" else value
        unit = f" ({units[key]})" if units.get(key) else ""
        shown = yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("\n...")
        lines.append(f"{'  ' * (key.count('.'))}{last}: {shown}  # {field.description}{unit}")
    return "\n".join(lines) + "\n"


def _as_served(served: Served) -> dict[str, Any]:
    return {
        "engine.name": "vllm", "engine.python": served.python, "engine.args": served.args, "engine.env": served.env,
        "target.dtype": served.dtype, "target.trust_remote_code": served.remote_code,
    }  # fmt: skip


def _sections_last(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys of a section before its inner sections, so that each section is opened once."""
    order = list(dict.fromkeys(key.partition(".")[0] for key in fields))
    return sorted(
        fields.items(), key=lambda item: (order.index(item[0].partition(".")[0]), item[0].count("."))
    )


def _default(field: Any) -> Any:
    value = field.get_default(call_default_factory=True)
    return (
        [v.model_dump() if hasattr(v, "model_dump") else v for v in value]
        if isinstance(value, list)
        else value
    )


def write_recipe(target: Target, name: str, out: Path, served: Served | None = None) -> None:
    """Raises UsageError when the file is there already."""
    if out.exists():
        raise UsageError(f"{out} is there already; name another with --out, or remove it.")
    text = new_recipe(target, name, served)
    out.write_text(text, encoding="utf-8")
    recipe.read(out)  # what we wrote must be valid
