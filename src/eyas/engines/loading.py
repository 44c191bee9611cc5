"""What an engine would make of a drafter's folder, without starting it: one view for each version and runner.

A view has the fields of a contract's card as the engine takes them, and what becomes of every tensor. Facts hold for the versions whose
source was read; between two of them a field is known where both say the same, outside them it is unknown.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.contract import Card, Fact
from eyas.drafter.dialects import Folder, canonical
from eyas.drafter.shapes import wanted_shapes

Version = tuple[int, ...]


@dataclass
class View:
    """engine: name, version and runner. fields: as the engine takes them. Tensors by their names on disk, `left` by canonical ones."""

    engine: str
    fields: Card = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # without a word
    left: list[str] = field(
        default_factory=list
    )  # parameters that nothing fills: memory as it was, norms of ones
    refuses: list[str] = field(default_factory=list)  # why it would not start
    notes: list[str] = field(default_factory=list)

    def take(self, name: str, value: Any, why: str) -> None:
        self.fields[name] = Fact(value, "derived", why)


def parse(version: str) -> Version:
    """0.32.0 -> (0, 32, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def shown(version: Version) -> str:
    return ".".join(map(str, version))


def at(engine: str, version: Version, known: Sequence[Version], view: Callable[[Version], View]) -> View:
    """The view of a version: its own, or what its two neighbours agree on, or nothing but unknown fields."""
    if version in known:
        return view(version)
    below, above = [v for v in known if v < version], [v for v in known if v > version]
    made = View(engine)
    names = view(known[-1]).fields
    if not below or not above:
        span = f"{shown(known[0])} to {shown(known[-1])}"
        made.fields = {
            n: Fact(None, "unknown", f"{shown(version)} is outside {span}, which were read") for n in names
        }
        made.notes.append(
            f"{engine} was not read (read: {', '.join(map(shown, known))}): nothing is known of it"
        )
        return made
    a, b = view(below[-1]), view(above[0])
    why = f"{shown(below[-1])} and {shown(above[0])} differ in it, and {shown(version)} was not read"
    for n in names:
        same = a.fields[n].value == b.fields[n].value and a.fields[n].known and b.fields[n].known
        made.fields[n] = a.fields[n] if same else Fact(None, "unknown", why)
    for name in ("loads", "skipped", "left", "refuses"):
        mine, theirs = getattr(a, name), getattr(b, name)
        setattr(made, name, [x for x in mine if x in theirs])
        if set(mine) != set(theirs):
            made.notes.append(f"what becomes of some tensors is unknown: {why}")
    return made


def misshapen(folder: Folder, fields: Card, width: int) -> list[str]:
    """Tensors whose shape is not the one that the fields ask for."""
    out, names = [], folder.names()
    for name, shape in wanted_shapes(fields, width).items():
        disk = names.get(name)
        if disk and folder.tensors[disk].shape != shape:
            out.append(f"{disk} has shape {folder.tensors[disk].shape}, and {shape} follows from config.json")
    return out


def sort_tensors(
    view: View, folder: Folder, wanted: Sequence[str], accepts: Callable[[str, str], str]
) -> None:
    """Fill loads, skipped, left and refuses. accepts(disk name, canonical name): load | skip | refuse."""
    filled = set()
    for disk in folder.tensors:
        name = canonical(disk)
        fate = accepts(disk, name)
        if fate == "load":
            view.loads.append(disk)
            filled.add(name)
        elif fate == "skip":
            view.skipped.append(disk)
        else:
            view.refuses.append(f"{disk} is not a tensor that it knows")
    view.left = [name for name in wanted if name not in filled]
