"""What a server counts: tokens, requests, drafts. Counters only grow, so figures are differences over a known time."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from eyas.errors import SurroundingsError
from eyas.servers import client

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +([0-9.eE+-]+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


class Counters(NamedTuple):
    """Sums over all engines behind a server."""

    generated: float  # tokens
    prompts: float  # tokens
    finished: float  # requests
    cached: float  # prompt tokens that were not computed, being in the prefix cache
    drafts: float  # steps that verified drafts
    drafted: float  # tokens
    accepted: float  # tokens
    accepted_at: dict[int, float]  # by draft position, from 0

    def since(self, before: "Counters") -> "Counters":
        numbers = {name: n - before.numbers()[name] for name, n in self.numbers().items()}
        at = {i: n - before.accepted_at.get(i, 0.0) for i, n in self.accepted_at.items()}
        return Counters(**numbers, accepted_at=at)

    def numbers(self) -> dict[str, float]:
        return {name: n for name, n in self._asdict().items() if name != "accepted_at"}


def read(url: str, names: Mapping[str, str]) -> Counters | None:
    """A server's counters now, under the engine's names for them; None where it has no such page or other names."""
    try:
        text = client.get(f"{url}/metrics")
    except SurroundingsError:
        return None
    return parse(text, names)


def parse(text: str, names: Mapping[str, str]) -> Counters | None:
    """Counters of a page of metrics; those that a server without drafter lacks are 0."""
    fields = {theirs: ours for ours, theirs in names.items()}
    sums = dict.fromkeys(names, 0.0)
    at: dict[int, float] = {}
    seen = set()
    for name, labels, number in LINE.findall(text):
        ours = fields.get(name)
        if ours is None:
            continue
        seen.add(ours)
        sums[ours] += float(number)
        if ours == "accepted_at" and (found := POSITION.search(labels)):
            at[int(found[1])] = at.get(int(found[1]), 0.0) + float(number)
    if "generated" not in seen:
        return None
    del sums["accepted_at"]
    return Counters(**sums, accepted_at=at)
