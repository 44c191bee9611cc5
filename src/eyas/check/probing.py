"""The parity probe of a drafter's folder: answers of its target, replayed under every reading of the drafter (drafter/probe.py).

    eyas check DRAFTER --target T --probe [--on CONVERSATIONS|STATES]        eyas check RUN --probe

The answers are the target's own: written now to prompts that ship with eyas, or those of a folder. Their states come from the embedded
engine, for the stated layers and their neighbours; states that are stored hold the stated layers alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from eyas.causes import Finding, error, info, unknown, warning
from eyas.check import data_rules
from eyas.drafter import facts, opening, probe
from eyas.drafter.probe import Axis, Found, Rows
from eyas.engines import hf, reading
from eyas.engines.reading import Said
from eyas.errors import ContractError, UsageError
from eyas.progress import say, table
from eyas.rundir import read_json
from eyas.stores import conversations, states
from eyas.target import Target

CONVERSATIONS, TOKENS = 48, 128  # that are probed, and of an answer that is written for it
LONG, LONG_TOKENS = 8, 1024  # of these with a history, and its length: rope shows in long rows
LEAST_SKILL = 0.1  # a_1 as found, below which the weights know nothing of this target
FIELD = {"layers": "aux_layers"}  # of the card, where it has another name than the axis
KEYS = {
    "before_residual": "norm_before_residual", "fed_back": "norm_output", "rope": "rope_theta and rope_scaling",
    "layers": "eagle_aux_hidden_state_layer_ids",
}  # fmt: skip


class Place(NamedTuple):
    """Where the target runs. dtype: "auto" or one of the recipe's."""

    dtype: str = "auto"
    remote_code: bool = False


class Prompt(NamedTuple):
    """A prompt that training of eyas's own drafters holds out."""

    name: str
    messages: list[dict[str, str]]


def look(
    folder: Path, target: Target, on: Path | None, prompts: Callable[[], Sequence[Prompt]], place: Place
) -> tuple[list[Finding], dict[str, Any]]:
    """Probe a drafter; prints what was found on each axis, and returns findings and probe.json.

    Raises ContractError where the drafter cannot be computed or nothing can be replayed, UsageError where `on` is no data.
    """
    f = facts.gather(folder, target)
    open_ = opening.assumed(f.card, target)
    held = opening.read(f, target, open_)
    device = hf.choose_device().value
    seen, origin = rows(held.drafter.contract.aux_layers, target, on, prompts, place, device)
    say(f"  probe: {origin}")
    axes = {next((a for a, name in FIELD.items() if name == field), field) for field in open_}
    found = probe.run(held, seen, target, device)
    show(found)
    made = findings(found, axes)
    return made, {**found.as_json(), "answers": origin, "open": sorted(axes)}


# ---- answers and states ----


def rows(
    stated: tuple[int, ...], target: Target, on: Path | None, prompts: Callable[[], Sequence[Prompt]], place: Place, device: str
) -> tuple[Rows, str]:  # fmt: skip
    if on is not None and data_rules.is_states(on):
        return _stored(on, target)
    dtype = hf.choose_dtype(place.dtype, device).value
    if why := reading.too_large(target, dtype, device):
        raise UsageError(
            f"probe: {why}. Give states that a run has extracted: --on RUN/states (the layer axis is then not probed)."
        )
    wanted = probe.candidates(stated, target)
    engine = hf.HFEngine(target, dtype, device, wanted, place.remote_code)
    if on is None:
        said = _written(engine, target, prompts(), place)
        origin = f"{len(said)} answers that the target wrote now"
    else:
        said = _of_conversations(on, target)
        origin = f"{len(said)} conversations of {on}"
    if not said:
        raise ContractError("probe: the target gave no answer of two tokens or more")
    return Rows(reading.states_of(engine, said), wanted), origin


def _stored(folder: Path, target: Target) -> tuple[Rows, str]:
    about = read_json(folder / "manifest.json") if (folder / "manifest.json").is_file() else {}
    ids = about.get("aux_layers")
    if not isinstance(ids, list):
        raise UsageError(f"probe: {folder}/manifest.json does not name the aux layers of its states")
    inputs = about.get("inputs")
    _refuse_other(
        folder, {str(inputs["target"])} if isinstance(inputs, dict) and "target" in inputs else set(), target
    )
    held = _held_out(folder.parent / "conversations")
    refs = list(states.verified(folder, about["content"]))
    chosen = [r for r in refs if r.row_id in held] or refs
    step = max(1, len(chosen) // CONVERSATIONS)
    rows = [r.load() for r in chosen[::step][:CONVERSATIONS]]
    kind = "held-out " if held else ""
    return Rows(rows, tuple(ids)), f"{len(rows)} {kind}rows of {folder}, with the states of layers {ids}"


def _refuse_other(folder: Path, writers: set[str], target: Target) -> None:
    if writers - {target.fingerprint}:
        raise UsageError(
            f"probe: {folder} is of another target ({', '.join(sorted(writers))}) than {target.folder} ({target.fingerprint}): a drafter is "
            "probed on what its own target writes"
        )


def _held_out(folder: Path) -> set[str]:
    if not data_rules.is_conversations(folder):
        return set()
    return {r.row_id for r in conversations.read(folder, "held_out")}


def _of_conversations(folder: Path, target: Target) -> list[Said]:
    if not data_rules.is_conversations(folder):
        raise UsageError(f"probe: {folder} holds neither conversations nor states of eyas")
    rows = [r for r in conversations.read(folder) if len(r.completion_ids) > 1 and r.prompt_ids]
    _refuse_other(folder, {r.target for r in rows}, target)
    rows = [r for r in rows if r.split == "held_out"] or rows
    rows = conversations.spread(rows, CONVERSATIONS, lambda r: r.domain)
    return [Said(r.row_id, r.ids, len(r.prompt_ids)) for r in rows]


def _written(engine: hf.HFEngine, target: Target, prompts: Sequence[Prompt], place: Place) -> list[Said]:
    """Greedy answers; the last prompts get a history of earlier ones and their answers, as a server renders it."""
    tokenizer = target.tokenizer(place.remote_code)
    room = target.context - TOKENS
    long = min(LONG, len(prompts) // 4)
    short = [
        (p.name, ids) for p in prompts[: len(prompts) - long] if (ids := render(tokenizer, p.messages, room))
    ]
    said = reading.answered(engine, short, TOKENS)
    texts = {s.name: tokenizer.decode(s.ids[s.start :], skip_special_tokens=True) for s in said}
    turns = [
        [*p.messages, {"role": "assistant", "content": texts[p.name]}] for p in prompts if p.name in texts
    ]
    wanted = min(LONG_TOKENS, room // 2)
    longer = []
    for number, p in enumerate(prompts[len(prompts) - long :]):
        history: list[dict[str, str]] = []
        ids = render(tokenizer, p.messages, room)
        for turn in turns[number::2] + turns[1 - number % 2 :: 2]:
            if not ids or len(ids) >= wanted:
                break
            history = [*history, *(m for m in turn if m["role"] != "system" or not history)]
            ids = (
                render(tokenizer, [*history, *(m for m in p.messages if m["role"] != "system")], room) or ids
            )
        if ids:
            longer.append((p.name, ids))
    return said + reading.answered(engine, longer, TOKENS)


def render(tokenizer: Any, messages: list[dict[str, str]], room: int) -> list[int]:
    """Prompt ids as a server renders them; empty where the template refuses them, or they do not fit."""
    try:
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (TemplateError, ValueError, TypeError):
        return []
    ids = list(made["input_ids"])
    return ids if len(ids) <= room else []


# ---- what is said ----


def show(found: Found) -> None:
    """The axes as a table, and the acceptance as stated and as found."""
    rows = [["axis", "stated", "trained for", "by", "as stated", "next best", "margin"]]
    for a in found.axes:
        rows.append([a.name, probe.short(a.stated), _verdict(a), a.measure, *_numbers(a)])
    table(rows)
    tau = found.tau_stated
    said = f"  replayed tau at k={probe.DEEP}: {tau.value:.3f} [{tau.low:.3f}, {tau.high:.3f}] as stated"
    if found.tau_found != tau:
        said += (
            f", {found.tau_found.value:.3f} [{found.tau_found.low:.3f}, {found.tau_found.high:.3f}] as found"
        )
    say(f"{said}; {found.conversations} conversations, {found.pairs:,} positions")
    if len(found.ranges) > 1:
        parts = ", ".join(f"from {r['from']:,}: {r['a_1_stated']:.3f} ({r['pairs']:,})" for r in found.ranges)
        say(f"  a_1 by position: {parts}")


def _verdict(a: Axis) -> str:
    return {"agrees": "the same", "differs": probe.short(a.found)}.get(a.state, a.state)


def _numbers(a: Axis) -> list[str]:
    if not a.options or a.margin is None:
        return ["", "", ""]
    own = abs(a.of(a.stated))
    rest = sorted((o for o in a.options if o.value != a.stated), key=lambda o: -o.score.value)
    m = a.margin
    return [
        f"{own:.3f}",
        f"{abs(rest[0].score.value):.3f} ({probe.short(rest[0].value)})",
        f"{m.value:+.3f} [{m.low:+.3f}, {m.high:+.3f}]",
    ]


def findings(found: Found, guessed: set[str]) -> list[Finding]:
    """What the probe says against the folder, and what it could not tell. guessed: axes that the folder leaves open."""
    out = []
    for a in found.axes:
        if a.name in guessed:
            out.append(_answer(a))
        elif a.state == "differs":
            out.append(error("probe", probe.sentence(a), _fix(a)))
        elif a.state == "undetermined":
            out.append(info("probe", _open(a)))
        elif a.state == "not probed" and a.note:
            out.append(info("probe", f"{a.name}: not probed: {a.note}"))
    share = sum(r["a_1_found"] * r["pairs"] for r in found.ranges) / max(found.pairs, 1)
    if share < LEAST_SKILL:
        out.append(warning("probe", f"the first draft is right at {share:.1%} of {found.pairs:,} positions under the best reading: these weights were not trained for "
            "this target, or on other text",
            "ask which target, tokenizer and revision it was trained for",
        ))  # fmt: skip
    return out


def _fix(a: Axis) -> str:
    if a.name == "map":
        return (
            "eyas check DIR --fix"
            if a.found == "absolute"
            else "export d2t from the checkpoint that the head comes from"
        )
    if a.name == "teacher":
        return "train again, with targets head(norm(last state))"
    if a.name == "fc_norm":
        return (
            "export the norms' tensors, and state fc_norm or norm_before_fc"
            if a.stated == "none"
            else f"state fc_norm or norm_before_fc as trained ({a.found})"
        )
    if a.name == "layers":
        return (
            f"state {list(a.found)} as {KEYS['layers']} at the top level (id i = input of layer i); eyas convert then writes each engine's "
            "numbering"
        )
    value = (
        {"normed": "true", "hidden": "false"}.get(a.found, probe.short(a.found))
        if a.name == "fed_back"
        else probe.short(a.found)
    )
    value = {"yes": "true", "no": "false"}.get(value, value)
    return f"write {value} for {KEYS[a.name]} in config.json"


def _open(a: Axis) -> str:
    near = [
        o
        for o in a.options
        if o.value != a.stated
        and abs(o.score.value - a.of(a.stated)) <= abs(a.margin.high if a.margin else 0)
    ]
    names = ", ".join(probe.short(o.value) for o in near) or "the others"
    return f"{a.name}: undetermined: {probe.short(a.stated)} as stated ({a.measure} {abs(a.of(a.stated)):.3f}) cannot be told from {names} on these rows"


def _answer(a: Axis) -> Finding:
    """An axis that the folder leaves open."""
    if a.state == "undetermined":
        return unknown(
            "probe",
            _open(a).replace(" as stated", ", a guess,"),
            f"ask who trained it, and state {KEYS.get(a.name, a.name)}",
        )
    options = sorted(a.options, key=lambda o: -o.score.value)
    if a.state == "not probed":
        return unknown(
            "probe",
            f"{a.name}: not probed: {a.note}",
            f"ask who trained it, and state {KEYS.get(a.name, a.name)}",
        )
    second = options[1].score.value if len(options) > 1 else 0.0
    return info(
        "probe",
        f"{a.name} is not stated; the weights were trained for {probe.short(a.found)}: {a.measure} {options[0].score.value:.2f} against {second:.2f}",
        _fix(a) if a.name in KEYS else "",
    )
