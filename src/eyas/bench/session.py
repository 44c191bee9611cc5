"""Measuring servers: rounds of loads, kept file by file, so that a run that was stopped goes on after the last one.

bench/k3-c8-round-001.json   k = 3, 8 requests at once, second round
bench/k3-sampled.json        the same prompts at the temperature that the answers of training were sampled with
bench/k3-probes.json         schema, tool, long prompt      bench/rerun.json  the plain answers again
bench/same.json              greedy answers compared, judged by the plain server
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from eyas import interrupt
from eyas.bench import load, measure, same
from eyas.bench.load import Ask, Load, Place, Round
from eyas.bench.measure import Counted, Request
from eyas.errors import SurroundingsError
from eyas.progress import Progress, say
from eyas.rundir import read_json, write_json
from eyas.schema import BenchSection
from eyas.servers import client

FOREIGN_SHARE = 0.02  # of our tokens, above which a cell is refused
CACHED_SHARE = 0.01
CONFIDENCE = 0.99  # of the interval that says that sampled answers are not the target's
LONG_MOST, LONG_DEFAULT, LONG_MARGIN = 16384, 4096, 64  # tokens


LongPrompt = Callable[[int], Ask]  # of a length in tokens


def longest(place: Place) -> int:
    """Tokens of the long prompt: what the server takes at once, up to a bound, less room for the answer."""
    return min(client.served(place.url).longest or LONG_DEFAULT, LONG_MOST) - LONG_MARGIN


class Session:
    """What is measured, and where it is kept. temperature: of the extra round with sampled answers, or 0 for none."""

    def __init__(
        self,
        folder: Path,
        options: BenchSection,
        asks: list[Ask],
        long_prompt: LongPrompt,
        temperature: float,
    ) -> None:
        self.folder, self.options, self.asks, self.long_prompt = folder, options, asks, long_prompt
        self.temperature = temperature if options.temperature == 0 else 0.0
        self.lowest = min(options.concurrency)
        self.limits: dict[tuple[str, int], float] = {}

    # ---- what there is ----

    def round_file(self, k: int, concurrency: int, number: int) -> Path:
        return self.folder / f"k{k}-c{concurrency}-round-{number:03d}.json"

    def missing(self, k: int, numbers: Iterable[int]) -> bool:
        """Whether a server with this k has anything left to do in these rounds."""
        files = [self.round_file(k, c, n) for n in numbers for c in self.options.concurrency]
        files.append(self.folder / f"k{k}-probes.json")
        if self.temperature:
            files.append(self.folder / f"k{k}-sampled.json")
        return not all(f.is_file() for f in files)

    def judged(self) -> bool:
        return (self.folder / "same.json").is_file()

    def read(self, k: int, concurrency: int) -> list[Round]:
        numbers = range(self.options.rounds)
        files = [self.round_file(k, concurrency, n) for n in numbers]
        return [load.read_round(read_json(f)) for f in files if f.is_file()]

    def sampled(self, k: int) -> Round | None:
        path = self.folder / f"k{k}-sampled.json"
        return load.read_round(read_json(path)) if path.is_file() else None

    # ---- measuring ----

    def _load(self, concurrency: int, temperature: float | None = None) -> Load:
        o = self.options
        heat = o.temperature if temperature is None else temperature
        return Load(concurrency, o.max_tokens, heat, o.lengths == "fixed")

    def _one(self, path: Path, place: Place, wanted: Load, number: int) -> None:
        """Measure a round and keep it; the first at a load on a server is preceded by a warm-up."""
        interrupt.safe_place()
        asks = load.wanted(self.asks, wanted.concurrency)
        at = (place.url, wanted.concurrency)
        if at not in self.limits:
            self.limits[at] = load.warm_up(place, asks, wanted)
        made = load.measure(place, asks, wanted, number, self.limits[at])
        _refuse_empty(place, made)
        write_json(path, made.as_json())

    def measure(self, places: Sequence[Place], numbers: Iterable[int]) -> None:
        """All loads of these rounds, then probes and sampled answers."""
        self.loads(places, numbers)
        self.extras(places)

    def loads(self, places: Sequence[Place], numbers: Iterable[int]) -> None:
        """All loads of these rounds on these servers, which take turns in being first."""
        numbers = list(numbers)
        by_k = {p.k: p for p in places}
        total = len(numbers) * len(self.options.concurrency) * len(places)
        with Progress("bench", total, "loads", "loads") as progress:
            for number in numbers:
                for concurrency in self.options.concurrency:
                    for k in measure.order(sorted(by_k), number):
                        path = self.round_file(k, concurrency, number)
                        if not path.is_file():
                            self._one(path, by_k[k], self._load(concurrency), number)
                        progress.add(1, note=f"k={k}, {concurrency} at once")

    def extras(self, places: Sequence[Place]) -> None:
        """Probes, and the sampled answers."""
        for place in places:
            path = self.folder / f"k{place.k}-probes.json"
            if not path.is_file():
                found = same.probes(place, self.long_prompt(longest(place)))
                client.served(place.url)  # a server that died of a probe is a failure, not an outcome
                same.show(place.k, found)
                write_json(path, {name: o._asdict() for name, o in found.items()})
            path = self.folder / f"k{place.k}-sampled.json"
            if self.temperature and not path.is_file():
                self._one(path, place, self._load(self.lowest, self.temperature), 0)

    def judge(self, plain: Place, ks: Sequence[int]) -> None:
        """Compare what all servers have answered, while the plain one is up."""
        if self.judged():
            return
        out: dict[str, Any] = {"rerun": None, "outputs": {}, "sampled": {}, "long": {}}
        base = self.read(0, self.lowest)
        if self.options.temperature == 0:
            path = self.folder / "rerun.json"
            if len(base) < 2 and not path.is_file():
                self._one(path, plain, self._load(self.lowest), 0)
            again = base[1] if len(base) > 1 else load.read_round(read_json(path))
            drafted = [r for k in ks for r in self.read(k, self.lowest)[0].requests]
            prompts = {a.row_id: a.prompt_ids for a in self.asks if a.prompt_ids is not None}
            if prompts and all(r.ids for r in drafted):
                rerun, outputs = same.compare(plain, prompts, base[0].requests, again.requests, drafted)
                out |= {"rerun": rerun, "outputs": {str(k): v for k, v in outputs.items()}}
        out["sampled"] = {str(k): self._unlikely(plain, k) for k in ks} if self.temperature else {}
        kept = self.probes(0)
        out["long"] = {str(k): same.compare_long(plain, kept, self.probes(k))._asdict() for k in ks}
        write_json(self.folder / "same.json", out)

    def _unlikely(self, plain: Place, k: int) -> str | None:
        """Why the answers that were sampled with k drafts cannot be the target's, or None (also where it cannot be told)."""
        prompts = {a.row_id: a.prompt_ids for a in self.asks}
        found: list[list[float]] = [[], []]
        sides = [self.sampled(n) for n in (0, k)]
        for own, drafted in zip(*(s.requests if s else [] for s in sides), strict=True):
            pair = [
                same.surprise(plain, prompts[r.prompt] or [], r.ids)
                for r in (own, drafted)
                if r.ids and prompts[r.prompt]
            ]
            if len(pair) == 2 and pair[0] is not None and pair[1] is not None:
                found[0].append(pair[0])
                found[1].append(pair[1])
        return same.unlikely(found[0], found[1], CONFIDENCE) if found[0] else None

    def probes(self, k: int) -> dict[str, Any]:
        return dict(read_json(self.folder / f"k{k}-probes.json"))

    # ---- figures ----

    def requests(self, ks: Sequence[int]) -> list[Request]:
        return [
            r
            for k in (0, *ks)
            for c in self.options.concurrency
            for round_ in self.read(k, c)
            for r in round_.requests
        ]

    def _rounds(
        self, ks: Sequence[int]
    ) -> tuple[dict[tuple[int, int], list[Round]], dict[tuple[int, int], Counted]]:
        """By (load, k): the rounds, and what the servers counted in them."""
        rounds = {(c, k): self.read(k, c) for c in self.options.concurrency for k in (0, *ks)}
        return rounds, {at: c for at, rs in rounds.items() if at[1] and (c := _counted(rs, at[1]))}

    def figures(self, ks: Sequence[int], confidence: float) -> list[dict[str, Any]]:
        """measure.cells of what was measured."""
        rounds, counted = self._rounds(ks)
        walls = {at: sum(r.wall_s for r in rs) for at, rs in rounds.items()}
        return measure.cells(self.requests(ks), confidence, walls, counted)

    def cells(self, ks: Sequence[int], confidence: float) -> list[dict[str, Any]]:
        """One record per load and k: measure.cells, and what the servers' counters, probes and comparisons add."""
        rounds, counted = self._rounds(ks)
        judged = read_json(self.folder / "same.json")
        found = self.figures(ks, confidence)
        for cell in found:
            k, c = cell["k"], cell["concurrency"]
            foreign = {name: _foreign(rounds[c, n]) for name, n in (("baseline", 0), ("drafter", k))}
            cell["foreign_share"], cell["cached_share"] = foreign, _cached(rounds[c, k])
            cell["tau_from"] = "counters" if (c, k) in counted and not counted[c, k].foreign else "stream"
            if max(foreign.values()) > FOREIGN_SHARE:
                cell["refused"] = (
                    f"other traffic ran beside it ({foreign['baseline']:.1%} of the plain and {foreign['drafter']:.1%} of the "
                    "drafting server's tokens were not ours); measure again when the servers are free"
                )
            sampled = self.sampled(k)
            cell["sampled"] = _sampled(sampled, k, self.temperature) if sampled else None
            if cell["sampled"]:
                cell["sampled"]["unlikely"] = judged["sampled"].get(str(k))
            cell["outputs"] = judged["outputs"].get(str(k))
            cell["probes"] = _beside(self.probes(k), self.probes(0), judged["long"].get(str(k)))
        return found


def _beside(
    drafted: dict[str, Any], plain: dict[str, Any], long: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """What became of each probe with the drafter, and what without: a target that cannot do it alone says nothing."""
    found = {name: drafted[name] for name in ("schema", "tool")} | {"long": long or drafted["long"]}
    return {
        name: {"kind": o["kind"], "detail": o["detail"], "without": plain[name]["kind"]}
        for name, o in found.items()
    }


def _refuse_empty(place: Place, made: Round) -> None:
    if not any(r.decoded > 0 for r in made.requests):
        raise SurroundingsError(
            f"bench: {place.label} answered every prompt with at most one token: there is nothing to time. Look at its answers."
        )


def _counted(rounds: Sequence[Round], k: int) -> Counted | None:
    """What a server's counters say of these rounds, or None without counters or drafts."""
    known = [r.counters for r in rounds if r.counters]
    drafts = sum(c.drafts for c in known)
    if len(known) < len(rounds) or not drafts:
        return None
    at = [sum(c.accepted_at.get(i, 0.0) for c in known) for i in range(k)]
    return Counted(drafts, at, sum(r.foreign for r in rounds))


def _foreign(rounds: Sequence[Round]) -> float:
    ours = sum(r.decoded + 1 for round_ in rounds for r in round_.requests)
    return sum(r.foreign for r in rounds) / ours if ours else 0.0


def _cached(rounds: Sequence[Round]) -> float | None:
    known = [r.counters for r in rounds if r.counters]
    prompts = sum(c.prompts for c in known)
    return sum(c.cached for c in known) / prompts if prompts else None


def _sampled(round_: Round, k: int, temperature: float) -> dict[str, Any] | None:
    counted = _counted([round_], k)
    if counted and not counted.foreign:
        return {"temperature": temperature, "tau": counted.tau}
    steps = sum(r.steps for r in round_.requests)
    accepted = sum(sum(r.accepted_at) for r in round_.requests)
    return {"temperature": temperature, "tau": 1 + accepted / steps} if steps else None


def warn(cells: Sequence[dict[str, Any]]) -> None:
    """What a user should know of a measurement before trusting it."""
    for cell in cells:
        where = f"k={cell['k']}, {cell['concurrency']} at once"
        if (cell["cached_share"] or 0) > CACHED_SHARE:
            say(
                f"  note: {where}: {cell['cached_share']:.1%} of the prompt tokens came from the prefix cache"
            )
        if any(cell["foreign_share"].values()):
            say(
                f"  note: {where}: other traffic ran beside the measurement; acceptance is taken from our own streams"
            )
