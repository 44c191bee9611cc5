"""The parity probe: which conventions a drafter's weights were trained for, by replaying it under each.

Its folder says one thing on every axis (aux layers, vocabulary map, norms, rope, what is fed back). The same answers of the target are
replayed with the others in place of it, one axis at a time, and what the weights accept most under is what they were trained for:

    layers             all ids one lower, as stated, one higher          a_1; the same
    map                offsets, absolute, or one learned from the answers a_1
    fc_norm            with the norms that are there, without; where there are none, with norms of ones    a_1
    before_residual    residual is the state, or the normed state         a_1; where it does not decide, all of three drafts
    rope               thetas and scalings that drafters are trained with a_1; the same
    fed_back           h or norm(h) to the next step                      a_2 and a_3 together
    teacher            final norm applied once, not at all, or twice      divergence of the first draft (lowest)

An axis is decided where the best is better than each other one beyond the interval of the difference, which comes from resampling the
conversations with both sides in each, and beyond what flipping the signs of their differences by chance gives, with as many options as
were looked at. Where another value is surely better, it takes the stated one's place and the axes are looked at once more, so that two
faults do not hide each other. Definitions of a_1, a_2: DESIGN "Words".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.contract import SCALINGS, Rope
from eyas.drafter import replay
from eyas.drafter.batch import pack, usable
from eyas.drafter.cards import rope_of
from eyas.drafter.network import Drafter, RMSNorm, unroll
from eyas.drafter.opening import Held
from eyas.drafter.replay import Interval
from eyas.errors import ContractError
from eyas.stores.states import RowStates
from eyas.target import Target

CONFIDENCE = 0.99  # of the intervals: many are looked at
FLIPS = 10_000  # of signs
PASSES = 3  # over the axes, at most
DEEP = 3  # drafts, where later positions count
THETAS = (1e4, 5e4, 1e5, 5e5, 1e6, 5e6, 1e7)
LOGITS = 1 << 25  # at once
RANGES = (0, 256, 1024, 4096, 16384)  # of positions, for rope
ELSEWHERE = (
    0.5  # of the learned map's ids that are other than the stated map's, above which it is another map
)
CLOSER = (
    "layers",
    "before_residual",
    "rope",
)  # looked at by more than the first draft where that does not decide
OFTEN, ONE_TO_ONE = (
    3,
    0.6,
)  # drafts of an id that say what it stands for, and the share of such ids that stand for a token of their own
AXES = ("map", "layers", "fc_norm", "before_residual", "rope", "fed_back")


class Teaching(NamedTuple):
    """What the teacher axis needs of the target: head rows of the draft ids, final norm."""

    head_WD: Tensor
    norm_D: Tensor
    eps: float


class Rows(NamedTuple):
    """Answers of the target with their states; layers: the ids whose states they hold."""

    rows: list[RowStates]
    layers: tuple[int, ...]


class Score(NamedTuple):
    """A share, by conversation: how often it was so, of how often it could be."""

    hits_R: np.ndarray
    of_R: np.ndarray

    @property
    def value(self) -> float:
        return float(self.hits_R.sum() / max(self.of_R.sum(), 1))

    def above(self, other: "Score") -> Interval:
        """This minus the other, on the same conversations."""

        def difference(w: np.ndarray) -> float:
            shares = [(w * s.hits_R).sum() / max((w * s.of_R).sum(), 1e-9) for s in (self, other)]
            return float(shares[0] - shares[1])

        return replay.bootstrap(len(self.hits_R), difference, CONFIDENCE)

    def surely_above(self, other: "Score", looks: int = 1) -> bool:
        """Whether this is better than the other beyond chance: by the interval, and by flipping the sign of each conversation's part in the
        difference at random, which few conversations with a few more hits do not survive. looks: at so many options, of which any could
        have come out best."""
        if self.above(other).low <= 0:
            return False
        sums = [max(s.of_R.sum(), 1e-9) for s in (self, other)]
        pooled = (self.hits_R.sum() + other.hits_R.sum()) / sum(sums)
        part_R = (self.hits_R - pooled * self.of_R) / sums[0] - (other.hits_R - pooled * other.of_R) / sums[1]
        signs = np.random.default_rng(0).choice((-1.0, 1.0), (FLIPS, len(part_R)))
        by_chance = (1 + int((signs @ part_R >= part_R.sum() - 1e-12).sum())) / (1 + FLIPS)
        return bool(by_chance < (1 - CONFIDENCE) / 2 / looks)


class Option(NamedTuple):
    """A value of an axis, and how the weights did under it."""

    value: Any
    score: Score


@dataclass(frozen=True)
class Axis:
    """What was found on one axis. state: agrees | differs | undetermined | not probed.

    found: the value that the weights were trained for, as far as that is known (the stated one where it is undetermined).
    margin: the best above the second, with its interval; loss: found above stated, where they differ."""

    name: str
    stated: Any
    found: Any
    state: str
    measure: str
    options: tuple[Option, ...] = ()
    margin: Interval | None = None
    loss: Interval | None = None
    note: str = ""

    def of(self, value: Any) -> float:
        return next(o.score.value for o in self.options if o.value == value)

    def as_json(self) -> dict[str, Any]:
        return {
            "axis": self.name, "stated": said(self.stated), "found": said(self.found), "state": self.state, "measure": self.measure,
            "options": [{"value": said(o.value), "share": o.score.value} for o in self.options],
            "margin": self.margin and self.margin._asdict(), "loss": self.loss and self.loss._asdict(), "note": self.note,
        }  # fmt: skip


class Found(NamedTuple):
    """A finished probe. tau_stated, tau_found: replayed at k = DEEP, as the folder says and as the weights were trained."""

    axes: tuple[Axis, ...]
    tau_stated: Interval
    tau_found: Interval
    conversations: int
    pairs: int
    ranges: tuple[dict[str, Any], ...]

    def axis(self, name: str) -> Axis:
        return next(a for a in self.axes if a.name == name)

    def as_json(self) -> dict[str, Any]:
        return {
            "axes": [a.as_json() for a in self.axes], "k": DEEP, "tau_stated": self.tau_stated._asdict(),
            "tau_found": self.tau_found._asdict(), "conversations": self.conversations, "pairs": self.pairs,
            "positions": list(self.ranges),
        }  # fmt: skip


def said(value: Any) -> Any:
    """A value as findings and JSON show it."""
    if isinstance(value, Rope):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def short(value: Any) -> str:
    """A value in a sentence."""
    value = said(value)
    return "yes" if value is True else "no" if value is False else str(value)


def sentence(a: Axis) -> str:
    """What differs on an axis, with its numbers."""
    assert a.loss is not None
    best = max(a.options, key=lambda o: o.score.value).score.value
    numbers = f"{a.measure} {abs(best):.2f} against {abs(a.of(a.stated)):.2f} ({a.loss.value:+.3f} [{a.loss.low:+.3f}, {a.loss.high:+.3f}])"
    if a.name == "layers":
        by = a.found[0] - a.stated[0]
        which = f"one {'later' if by > 0 else 'earlier'} than its config says ({list(a.found)} for {list(a.stated)})"
        return f"trained with layers {which}: {numbers}"
    if a.name == "map":
        if a.found == "another":
            return f"the vocabulary map is not the one that the head was trained under ({a.note}): a map learned from the answers gives {numbers}"
        return f"d2t holds target ids, not offsets: {numbers}"
    if a.name == "fc_norm" and a.stated == "none":
        return f"trained with norms before fc ({a.found}), whose weights the folder lacks: with norms of ones {numbers}"
    if a.name == "teacher":
        return f"trained on a teacher with {a.found}, and the target applies its final norm once: {numbers}"
    what = {
        "fc_norm": "norms before fc", "before_residual": "the normed state as residual", "rope": "rope", "fed_back": "the state that is fed back",
    }[a.name]  # fmt: skip
    also = f" ({a.note})" if a.note else ""
    return f"trained with {what}: {short(a.found)}{also}, and its config says {short(a.stated)}: {numbers}"


def candidates(stated: Sequence[int], target: Target) -> tuple[int, ...]:
    """The layers whose states tell about the layer axis: the stated ids, and those one lower and one higher."""
    return tuple(sorted({i + s for i in stated for s in (-1, 0, 1) if 0 <= i + s <= target.layers}))


def teaching(target: Target, kept_W: Tensor, device: torch.device | str) -> Teaching:
    head = target.head_VD()[kept_W.clamp(0, target.vocab - 1)].float()
    return Teaching(head.to(device), target.final_norm_D().to(device), target.eps)


def run(held: Held, rows: Rows, target: Target, device: str) -> Found:
    """Probe a drafter on answers of its target.

    Raises ContractError where no row has anything to draft, or the rows lack a stated layer.
    """
    return _Probe(held, rows, target, device).run()


class _Probe:
    def __init__(self, held: Held, rows: Rows, target: Target, device: str) -> None:
        self.rows = [r for r in rows.rows if usable(r)]
        self.layers, self.target = rows.layers, target
        if not self.rows:
            raise ContractError("probe: no conversation has an answer of two tokens or more")
        self.drafter = held.drafter.to(device)
        self.contract = held.drafter.contract
        self.there = "chunks" if len(self.drafter.fc_norm) else "whole" if self.drafter.input_norm else "none"
        self.norms = self._norms(device)
        self.embedding_VD = held.embedding_VD.to(device)
        self.offsets_W = self.drafter.d2t_W.clone()
        if lost := sorted(set(self.contract.aux_layers) - set(self.layers)):
            raise ContractError(
                f"probe: the drafter takes the states of layers {list(self.contract.aux_layers)}, and these rows hold {list(self.layers)}: "
                f"{lost} are missing. Give the target and conversations instead (--on CONVERSATIONS)."
            )
        self.table: dict[
            int, tuple[int, int]
        ] = {}  # the learned map: draft id -> token, and how often it was drafted
        self.firsts: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def _norms(self, device: str) -> dict[str, Any]:
        """The norms before fc that the folder has, and of the other kinds those of ones, which say whether there ever were any."""
        c, count = self.contract, len(self.contract.aux_layers)
        chunks, whole = self.drafter.fc_norm, self.drafter.input_norm
        ones = torch.nn.ModuleList(RMSNorm(c.hidden, c.eps) for _ in range(count)).to(device)
        return {
            "none": (torch.nn.ModuleList(), None),
            "chunks": (chunks if len(chunks) else ones, None),
            "whole": (torch.nn.ModuleList(), whole or RMSNorm(count * c.hidden, c.eps).to(device)),
        }

    # ---- settings ----

    def stated(self) -> dict[str, Any]:
        c = self.contract
        return {
            "layers": c.aux_layers, "map": "offsets", "fc_norm": c.norms.fc, "before_residual": c.norms.before_residual,
            "rope": c.rope, "fed_back": "normed" if c.norms.output else "hidden",
        }  # fmt: skip

    def values(self, axis: str) -> list[Any]:
        """The values that can be replayed, the stated one first."""
        own = self.stated()[axis]
        if axis == "layers":
            shifted = [tuple(i + s for i in self.contract.aux_layers) for s in (-1, 1)]
            return [own, *(x for x in shifted if set(x) <= set(self.layers))]
        if axis == "fc_norm":
            others = ["none"] if self.there != "none" else ["chunks", "whole"]
            return list(dict.fromkeys([own, self.there, *others]))
        if axis == "before_residual":
            return [own, not own]
        if axis == "fed_back":
            return [own, "hidden" if own == "normed" else "normed"]
        if axis == "rope":
            theirs = rope_of(self.target.config)[0] or Rope(self.target.rope_theta)
            plain = [Rope(t, (), own.partial) for t in (own.theta, theirs.theta, *THETAS)]
            known = {dict(s)["kind"] for s in (own.scaling, theirs.scaling) if s} <= set(SCALINGS)
            scaled = [
                Rope(t, s, own.partial)
                for t in (own.theta, theirs.theta)
                for s in (own.scaling, theirs.scaling)
            ]
            return list(dict.fromkeys([own, *(scaled if known else []), *plain]))
        return [own]

    def configure(self, setting: dict[str, Any]) -> tuple[int, ...]:
        """Put the network into a setting; returns where its aux states are among those that the rows hold."""
        c, rope = self.contract, setting["rope"]
        norms = replace(
            c.norms,
            fc=setting["fc_norm"],
            before_residual=setting["before_residual"],
            output=setting["fed_back"] == "normed",
        )
        self.drafter.fc_norm, self.drafter.input_norm = self.norms[norms.fc]
        self.drafter.contract = replace(
            c, norms=norms, rope_theta=rope.theta, rope_scaling=rope.scaling_dict() or None, rope_partial=rope.partial,
            aux_layers=setting["layers"],
        )  # fmt: skip
        self.drafter.forget_rope()
        places = torch.arange(len(self.offsets_W), device=self.offsets_W.device)
        ids = (self.map_of(setting["map"]) + places).clamp(
            0, c.vocab - 1
        )  # a wrong map may leave the vocabulary
        self.drafter.d2t_W.copy_(ids - places)
        return tuple(self.layers.index(i) for i in setting["layers"])

    def map_of(self, kind: str) -> Tensor:
        """d2t in one of its readings: where it holds ids, offsets are those less their places; a learned one, where it is known."""
        places = torch.arange(len(self.offsets_W), device=self.offsets_W.device)
        if kind == "learned":
            ids = self.offsets_W + places
            for w, (token, _) in self.table.items():
                ids[w] = token
            return ids - places
        return self.offsets_W if kind != "absolute" else self.offsets_W - places

    # ---- replays ----

    def chosen(self, places: tuple[int, ...]) -> list[RowStates]:
        return [replace(r, kept_TLD=r.aux_TLD[:, list(places)], scale_TL=None) for r in self.rows]

    def accepted(self, setting: dict[str, Any], k: int) -> list[list[int]]:
        places = self.configure(setting)
        return replay.accepted_lengths(self.drafter, self.embedding_VD, self.chosen(places), k)

    def first(self, setting: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """By conversation: the draft id that the first draft proposes at each live position, and the token that came."""
        key = repr({n: v for n, v in setting.items() if n not in ("map", "fed_back")})
        if key not in self.firsts:
            places = self.configure(setting)
            drafted, truth = [], []
            for group in replay.groups(self.chosen(places), self.drafter.fc.weight.device.type):
                batch = pack(group, self.drafter.fc.weight.device, 1)
                with torch.no_grad():
                    step = next(unroll(self.drafter, self.embedding_VD, batch, 1))
                    size = max(1, LOGITS // self.contract.draft_vocab)
                    best = torch.cat([self.drafter.logits(h).argmax(-1) for h in step.h.split(size)])
                for a, b in zip(batch.row_starts, batch.row_starts[1:], strict=False):
                    drafted.append(best[a:b].cpu().numpy())
                    truth.append(batch.truth_M[a:b].cpu().numpy())
            self.firsts[key] = (drafted, truth)
        return self.firsts[key]

    def score(self, axis: str, setting: dict[str, Any]) -> Score:
        if axis == "fed_back":
            return _later(self.accepted(setting, DEEP))
        drafted, truth = self.first(setting)
        if setting["map"] == "learned":
            return _learned(drafted, truth)[0]
        d2t = self.map_of(setting["map"]).cpu().numpy()
        pairs = zip(drafted, truth, strict=True)
        return _share([(d + d2t[d] == t, np.ones(len(d))) for d, t in pairs])

    # ---- axes ----

    def run(self) -> Found:
        stated = setting = self.stated()
        found: dict[str, Axis] = {}
        for _ in range(PASSES):
            before = setting
            for axis in AXES:
                found[axis] = self.look(axis, setting, stated)
                value = found[axis].found
                setting = setting | {axis: "learned" if value == "another" else value}
            if setting == before:
                break
        if (
            found["map"].found == "another"
        ):  # what is right under a wrong map, or under a learned one, is too little to go by
            found |= {
                n: replace(a, found=a.stated, state="not probed", note=MAP_FIRST)
                for n, a in found.items()
                if n != "map"
            }
            setting = stated | {"map": "learned"}
        alone = _walks(self.accepted(stated, DEEP))
        best = _walks(self.accepted(setting, DEEP)) if setting != stated else alone
        taught = self.taught(setting)
        if setting["map"] == "learned":
            taught = replace(taught, found=taught.stated, state="not probed", note=MAP_FIRST)
        axes = (*found.values(), taught)
        ranges = self.ranges(setting, stated)
        every = [sum(len(t) for t in self.first(setting)[1])]
        self.configure(stated)
        return Found(
            axes,
            replay.tau_interval(alone, 0.95),
            replay.tau_interval(best, 0.95),
            len(self.rows),
            every[0],
            ranges,
        )

    def look(self, axis: str, setting: dict[str, Any], stated: dict[str, Any]) -> Axis:
        """One axis, the others as they are in `setting`."""
        measure = "a_2 and a_3" if axis == "fed_back" else "a_1"
        values = self.map_values(setting) if axis == "map" else self.values(axis)
        if len(values) == 1:
            return Axis(axis, stated[axis], stated[axis], "not probed", measure, note=WHY_NOT[axis])
        options = [Option(v, self.score(axis, setting | {axis: v})) for v in values]
        made = decide(axis, stated[axis], options, measure)
        if made.state == "undetermined" and axis in CLOSER:
            made = self.closer(made, setting)
        if axis == "map" and made.found == "learned":
            return self.another(made, setting)
        return made

    def closer(self, made: Axis, setting: dict[str, Any]) -> Axis:
        """An axis that a_1 does not decide, by all accepted drafts of DEEP, which are more; options that are surely worse are left out."""
        best = max(made.options, key=lambda o: o.score.value)
        near = [
            o
            for o in made.options
            if o.value == made.stated or o is best or not best.score.surely_above(o.score)
        ]
        options = [
            Option(o.value, _drafts(self.accepted(setting | {made.name: o.value}, DEEP))) for o in near
        ]
        looks = 2 * (len(made.options) - 1)  # this one is the second
        again = decide(made.name, made.stated, options, f"accepted drafts of {DEEP}", looks)
        return made if again.state == "undetermined" else again

    def map_values(self, setting: dict[str, Any]) -> list[str]:
        if self.contract.draft_vocab == self.contract.vocab and not self.offsets_W.any():
            return ["offsets"]
        ids = self.offsets_W
        inside = bool(
            (ids >= 0).all() and (ids < self.contract.vocab).all() and ids.unique().numel() == len(ids)
        )
        return ["offsets", *(["absolute"] if inside else []), "learned"]

    def another(self, made: Axis, setting: dict[str, Any]) -> Axis:
        """A map learned from the answers does better: another map, if most drafts stand for other tokens under it, each for its own.
        Where it only mends a few ids, or sends many to the same frequent tokens, it is the drafter that knows little."""
        self.table = _learned(*self.first(setting))[1]
        d2t = self.map_of("offsets").cpu().numpy()
        often = {w: (t, n) for w, (t, n) in self.table.items() if n >= OFTEN}
        moved = sum(n for w, (t, n) in often.items() if w + d2t[w] != t)
        own = len({t for t, _ in often.values()}) / max(len(often), 1)
        if often and moved > ELSEWHERE * sum(n for _, n in often.values()) and own >= ONE_TO_ONE:
            return replace(made, found="another", note="the head's rows stand for other ids than d2t says")
        options = tuple(o for o in made.options if o.value != "learned")
        if len(options) == 1:
            return Axis(
                "map", made.stated, made.stated, "undetermined", made.measure, made.options, made.margin
            )
        return decide("map", made.stated, list(options), made.measure)

    def taught(self, setting: dict[str, Any]) -> Axis:
        """Which teacher the first draft's distribution is closest to, by mean KL divergence: the lower the better."""
        places = self.configure(setting)
        kept = self.drafter.kept_W
        teacher = teaching(self.target, kept.cpu(), kept.device)
        names = ("final norm", "no final norm", "final norm twice")
        sums: dict[str, list[float]] = {n: [] for n in names}
        counts: list[float] = []
        draft_id = torch.full((max(self.contract.vocab, int(kept.max()) + 1),), -1, device=kept.device)
        draft_id[kept] = torch.arange(len(kept), device=kept.device)
        for group in replay.groups(self.chosen(places), kept.device.type):
            batch = pack(group, kept.device, 1)
            with torch.no_grad():
                step = next(unroll(self.drafter, self.embedding_VD, batch, 1))
                inside = (draft_id[batch.top1_M.clamp(0, len(draft_id) - 1)] >= 0).float()
                size = max(1, LOGITS // self.contract.draft_vocab)
                parts = zip(step.h.split(size), batch.last_MD.split(size), strict=True)
                far = (
                    torch.cat([_divergences(self.drafter, teacher, h, last) for h, last in parts], 1) * inside
                )
            for a, b in zip(batch.row_starts, batch.row_starts[1:], strict=False):
                counts.append(float(inside[a:b].sum()))
                for name, row in zip(names, far, strict=True):
                    sums[name].append(float(row[a:b].sum()))
        options = [Option(n, Score(-np.array(sums[n]), np.array(counts))) for n in names]
        return decide("teacher", names[0], options, "divergence")

    def ranges(self, setting: dict[str, Any], stated: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """a_1 by position in the row, as stated and as found."""
        places = [r.start - 1 + np.arange(len(r) - r.start - 1) for r in self.rows]
        out = []
        scores = [
            (n, self.first(s), self.map_of(s["map"]).cpu().numpy())
            for n, s in (("stated", stated), ("found", setting))
        ]
        for low, high in zip(RANGES, (*RANGES[1:], 1 << 40), strict=True):
            picked = [(p >= low) & (p < high) for p in places]
            pairs = int(sum(p.sum() for p in picked))
            if pairs:
                shares = {
                    n: sum(
                        int(((d + m[d] == t) & p).sum())
                        for d, t, p in zip(drafted, truth, picked, strict=True)
                    )
                    / pairs
                    for n, (drafted, truth), m in scores
                }
                out.append({"from": low, "pairs": pairs, **{f"a_1_{n}": v for n, v in shares.items()}})
        return tuple(out)


MAP_FIRST = "the vocabulary map must be mended first"
WHY_NOT = {
    "layers": "there are no states of neighbouring layers (stored states hold the stated ones alone; the target and conversations give the others)",
    "map": "the whole vocabulary is drafted: there is no map",
    "fc_norm": "there is no such norm among the tensors",
    "before_residual": "", "rope": "", "fed_back": "",
}  # fmt: skip


def decide(axis: str, stated: Any, options: list[Option], measure: str, looks: int | None = None) -> Axis:
    """Agrees: the stated value is surely better than each other. Differs: another one is surely better than it; of several that do equally
    well the one that was named first. Else undetermined."""
    ranked = sorted(options, key=lambda o: -o.score.value)
    best, own = ranked[0], next(o for o in options if o.value == stated)
    margin = best.score.above(ranked[1].score)
    if best is own:
        sure = all(own.score.surely_above(o.score) for o in options if o is not own)
        return Axis(
            axis, stated, stated, "agrees" if sure else "undetermined", measure, tuple(options), margin
        )
    loss = best.score.above(own.score)
    if not best.score.surely_above(own.score, looks or len(options) - 1):
        return Axis(axis, stated, stated, "undetermined", measure, tuple(options), margin)
    equal = [o.value for o in options if o is best or (o is not own and not best.score.surely_above(o.score))]
    note = (
        f"{', '.join(short(v) for v in equal[1:])} would do as well on these rows" if len(equal) > 1 else ""
    )
    return Axis(axis, stated, equal[0], "differs", measure, tuple(options), margin, loss, note)


def _share(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Score:
    return Score(np.array([float(h.sum()) for h, _ in pairs]), np.array([float(o.sum()) for _, o in pairs]))


def _later(accepted: list[list[int]]) -> Score:
    """Second and third drafts that are right, of those whose predecessor was and that had a token to be compared with."""
    pairs = []
    for row in accepted:
        a = np.array(row)
        left = len(a) - np.arange(len(a))  # tokens that come, of this position on
        hits = sum((a >= i).astype(float) for i in range(2, DEEP + 1))
        could = sum(((a >= i - 1) & (left >= i)).astype(float) for i in range(2, DEEP + 1))
        pairs.append((np.asarray(hits), np.asarray(could)))
    return _share(pairs)


def _drafts(accepted: list[list[int]]) -> Score:
    """Accepted drafts of those that had a token to be compared with, at every position."""
    pairs = [
        (np.array(row, dtype=float), np.minimum(len(row) - np.arange(len(row)), DEEP)) for row in accepted
    ]
    return _share([(hits, could.astype(float)) for hits, could in pairs])


def _walks(accepted: list[list[int]]) -> list[replay.Walk]:
    return [replay.walk(a, DEEP) for a in accepted]


def _learned(drafted: list[np.ndarray], truth: list[np.ndarray]) -> tuple[Score, dict[int, tuple[int, int]]]:
    """a_1 under the map that the other half of the conversations teaches (draft id -> the token that came most often), and the map
    that all teach, with how often each id was drafted."""
    halves = [_most(drafted[i::2], truth[i::2]) for i in (0, 1)]
    pairs = []
    for i, (d, t) in enumerate(zip(drafted, truth, strict=True)):
        table = halves[1 - i % 2]
        guess = np.array([table.get(int(w), (-1, 0))[0] for w in d])
        pairs.append((guess == t, np.ones(len(d))))
    return _share(pairs), _most(drafted, truth)


def _most(drafted: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> dict[int, tuple[int, int]]:
    counts: dict[int, dict[int, int]] = {}
    for d, t in zip(drafted, truth, strict=True):
        for w, x in zip(d.tolist(), t.tolist(), strict=True):
            row = counts.setdefault(w, {})
            row[x] = row.get(x, 0) + 1
    return {w: (max(row, key=lambda x: row[x]), sum(row.values())) for w, row in counts.items()}


def _divergences(drafter: Drafter, teacher: Teaching, h_MD: Tensor, last_MD: Tensor) -> Tensor:
    """[3, M]: KL(teacher || drafter) for the final norm applied once, not at all, twice."""
    draft = drafter.logits(h_MD).float().log_softmax(-1)
    norm: Callable[[Tensor], Tensor] = lambda x: F.rms_norm(x, (x.shape[-1],), teacher.norm_D, teacher.eps)  # noqa: E731
    last = last_MD.float()
    once = norm(last)
    out = []
    for state in (once, last, norm(once)):
        target = (state @ teacher.head_WD.T).log_softmax(-1)
        out.append((target.exp() * (target - draft)).sum(-1))
    return torch.stack(out)
