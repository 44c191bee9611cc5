"""The rules for conversations and states: what a drafter would learn from them, before it does.

    eyas check CONVERSATIONS_FOLDER|STATES_FOLDER [--target T]

Reads conversations/part-*.parquet, or states/shard-*.safetensors with their manifest, and the conversations beside them if they are there.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.causes import Finding, error, info, unknown, warning
from eyas.errors import ContractError
from eyas.progress import say
from eyas.rundir import read_json
from eyas.stores import conversations, states, truth, weights
from eyas.stores.conversations import Row
from eyas.stores.states import RowRef
from eyas.target import Target

TRUNCATED, DOUBLED = 0.5, 0.01  # shares of rows, above which it is a warning
LOOPS, REFUSALS, CUT, FLAGGED = 0.05, 0.1, 0.2, 0.1
ON_POLICY = 0.95  # of the tokens of greedy answers, near ties of another batch apart
MATTERS = 0.05  # of the evaluation prompts
SMOKE_TOKENS = 100_000  # supervised tokens, below which a drafter only shows that everything runs
CLOSES_THOUGHT = ("</think>", "◁/think▷")
AGREES = 0.99  # of positions, at which the stored last state must give the target's own argmax
SAMPLED_POSITIONS, BLOCK = 2048, 256
AGAIN = "generate again: eyas run RECIPE --from generate"
EXTRACT = "extract again: eyas run RECIPE --from extract"


def is_conversations(folder: Path) -> bool:
    return bool(conversations.parts(folder))


def is_states(folder: Path) -> bool:
    return any(folder.glob("shard-*.safetensors")) or any(folder.glob("part-*.safetensors"))


def of_conversations(folder: Path, target: Target | None) -> Iterator[Finding]:
    """Every finding of a conversations folder."""
    try:
        every = [r for path in conversations.parts(folder) for r in conversations.read_part(path)]
    except ContractError as e:
        yield error("data-files", str(e), AGAIN)
        return
    rows = [r for r in every if not r.flag]
    yield from _manifest(folder, AGAIN)
    if not rows:
        yield error("data-files", f"{folder} holds no row", AGAIN)
    yield from _masks(folder, rows)
    yield from _ends(folder, rows, target)
    yield from _doubles(folder, rows)
    yield from _written_by(folder, rows, target)
    yield from _thoughts(folder, rows, target)
    yield from _truth(folder, every, target)
    yield from _like_the_evaluation(folder)
    yield from _amounts(folder, rows)


def _manifest(folder: Path, fix: str) -> Iterator[Finding]:
    if not (folder / "manifest.json").is_file():
        yield error("data-files", f"{folder} has no manifest.json: it was not finished", fix)


def _share(n: int, rows: list[Row]) -> str:
    return f"{n:,} of {len(rows):,} rows ({n / len(rows):.1%})"


def _masks(folder: Path, rows: list[Row]) -> Iterator[Finding]:
    """What is trained is the completion: none of a row, or all of it, is a mask that went wrong."""
    empty = [r for r in rows if not r.completion_ids]
    if empty:
        yield error(
            "data-masks",
            f"{folder}: {_share(len(empty), rows)} have no answer to learn from (first: {empty[0].row_id})",
            AGAIN,
        )
    bare = [r for r in rows if not r.prompt_ids]
    if bare:
        yield error(
            "data-masks",
            f"{folder}: {_share(len(bare), rows)} have no prompt: all of them would be learned (first: {bare[0].row_id})",
            AGAIN,
        )


def _ends(folder: Path, rows: list[Row], target: Target | None) -> Iterator[Finding]:
    cut = sum(r.finish_reason == "length" for r in rows)
    if cut > TRUNCATED * len(rows):
        yield warning("data-ends", f"{folder}: {_share(cut, rows)} were cut by max_tokens: the drafter would see few ends of turn",
            "raise generate.max_tokens",
        )  # fmt: skip
    if target is None:
        return
    lost = [
        r
        for r in rows
        if r.finish_reason == "stop" and r.completion_ids and r.completion_ids[-1] not in target.stop_ids
    ]
    if lost:
        last = Counter(r.completion_ids[-1] for r in lost).most_common(1)[0][0]
        yield error("data-ends", f"{folder}: {_share(len(lost), rows)} ended by themselves, and their last id ({last}) is none of the target's stop ids "
            f"{list(target.stop_ids)}: the end of turn is not learned",
            AGAIN,
        )  # fmt: skip


def _doubles(folder: Path, rows: list[Row]) -> Iterator[Finding]:
    ids = Counter(r.row_id for r in rows)
    doubled = [name for name, n in ids.items() if n > 1]
    if doubled:
        yield error(
            "data-doubles",
            f"{folder}: {len(doubled):,} row ids appear twice (first: {doubled[0]})",
            AGAIN,
        )
    same = Counter((tuple(r.prompt_ids), tuple(r.completion_ids)) for r in rows)
    more = sum(n - 1 for n in same.values())
    if more > DOUBLED * len(rows):
        yield warning(
            "data-doubles",
            f"{folder}: {_share(more, rows)} repeat a prompt and its answer",
            "give more distinct prompts, or fewer generate.samples",
        )
    both = {r.prompt_key for r in rows if r.split == "train"} & {
        r.prompt_key for r in rows if r.split == "held_out"
    }
    if both:
        yield error(
            "data-doubles",
            f"{folder}: {len(both):,} prompts are trained on and held out: acceptance would be measured too high",
            AGAIN,
        )


def _written_by(folder: Path, rows: list[Row], target: Target | None) -> Iterator[Finding]:
    writers = Counter(r.target for r in rows)
    if target and (other := sum(n for name, n in writers.items() if name != target.fingerprint)):
        yield error("data-target", f"{folder}: {_share(other, rows)} were not written by {target.folder} ({target.fingerprint}): a drafter learns what the target "
            "itself writes",
            AGAIN,
        )  # fmt: skip
    elif len(writers) > 1:
        yield error(
            "data-target",
            f"{folder}: rows of {len(writers)} targets are mixed ({', '.join(writers)})",
            AGAIN,
        )


def _thoughts(folder: Path, rows: list[Row], target: Target | None) -> Iterator[Finding]:
    """A target that can think, and no thought in any row."""
    known = target.added_tokens() if target else {}
    closes = [known[name] for name in CLOSES_THOUGHT if name in known]
    if closes and rows and not any(set(closes) & set(r.ids) for r in rows):
        yield warning("data-thoughts", f"{folder}: the target has a token that closes a thought ({closes[0]}), and no row holds it: if it thinks in serving, its thoughts "
            "were lost on the way",
            "look at a row, and at the server's reasoning parser",
        )  # fmt: skip


def _truth(folder: Path, every: list[Row], target: Target | None) -> Iterator[Finding]:
    """Shares of rows that a drafter had better not learn much from."""
    figures = truth.Figures(target.stop_ids if target else ())
    for row in every:
        figures.add(row)
    n = max(len(every), 1)
    for what, count, most, fix in (
        ("go round in circles", figures.looped, LOOPS, "sample at a temperature that the target was made for"),
        ("begin with a refusal", figures.refused, REFUSALS, "look at the prompts: a drafter for your traffic learns its answers"),
        ("were cut while still thinking", figures.cut_thoughts, CUT, "raise generate.max_tokens"),
        ("were left out, since their ids are not certain", sum(figures.counts["flags"].values()), FLAGGED,
            "ask a server that returns token ids; quarantine and manifest name the reasons"),
    ):  # fmt: skip
        if count > most * n:
            yield warning("data-truth", f"{folder}: {count:,} of {n:,} rows ({count / n:.1%}) {what}", fix)
    about = read_json(folder / "manifest.json") if (folder / "manifest.json").is_file() else {}
    found = about.get("on_policy")
    if found and found["agrees"] < ON_POLICY * found["positions"]:
        yield warning(
            "data-truth",
            f"{folder}: of the greedy answers that the target read once more, only {found['agrees'] / found['positions']:.1%} of "
            f"{found['positions']:,} tokens are its own first choice: they are not what it writes",
            "look at the server: its quantisation, its sampling defaults, or another model behind it",
        )


def _like_the_evaluation(folder: Path) -> Iterator[Finding]:
    """A script that the evaluation prompts have and the training prompts hardly."""
    about = read_json(folder / "manifest.json") if (folder / "manifest.json").is_file() else {}
    mine = about.get("prompts", {}).get("scripts", {})
    theirs = about.get("prompts", {}).get("evaluation", {}).get("scripts", {})
    for name, count in theirs.items():
        wanted = count / max(sum(theirs.values()), 1)
        have = mine.get(name, 0) / max(sum(mine.values()), 1)
        if wanted > MATTERS and have < wanted / 4:
            yield warning(
                "data-truth",
                f"{folder}: {wanted:.0%} of the evaluation prompts (prompts.keep_out) are in {name} script, and {have:.1%} of these",
                "add prompts of that kind (prompts.sources)",
            )


def _amounts(folder: Path, rows: list[Row]) -> Iterator[Finding]:
    supervised = sum(max(len(r.completion_ids) - 1, 0) for r in rows if r.split == "train")
    distinct = len({i for r in rows for i in r.completion_ids})
    said = f"{folder}: {len(rows):,} rows, {supervised:,} supervised tokens, {distinct:,} distinct ids in answers"
    if supervised < SMOKE_TOKENS:
        said += f"; below {SMOKE_TOKENS:,} a drafter trained from nothing shows that everything runs, and little more"
    yield info("data-amount", said)


def of_states(folder: Path, target: Target | None) -> Iterator[Finding]:
    """Every finding of a states folder."""
    yield from _manifest(folder, EXTRACT)
    about = read_json(folder / "manifest.json") if (folder / "manifest.json").is_file() else {}
    listed = about.get("content")
    try:
        refs = (
            states.verified(folder, listed)
            if listed
            else [r for p in _shards(folder) for r in states.rows_of(p)]
        )
    except ContractError as e:
        yield error("states-files", str(e), EXTRACT)
        return
    yield from _finite(folder)
    yield from _aligned(folder, refs)
    yield from _layers(folder, about, refs, target)
    if target is not None and target.files:
        yield from _agreement(folder, refs, target)


def _shards(folder: Path) -> list[Path]:
    return sorted([*folder.glob("shard-*.safetensors"), *folder.glob("part-*.safetensors")])


def _finite(folder: Path) -> Iterator[Finding]:
    for path in _shards(folder):
        held = weights.of_file(path)
        for name in held.infinite():
            yield error(
                "states-finite",
                f"{path}: {name} holds NaN or infinity",
                f"{EXTRACT} --set target.dtype=float32",
            )


def _aligned(folder: Path, refs: list[RowRef]) -> Iterator[Finding]:
    """One state for each id, and the ids of the conversations beside it."""
    beside = folder.parent / "conversations"
    rows = {r.row_id: r for r in conversations.read(beside)} if is_conversations(beside) else {}
    if not rows:
        yield info(
            "states-rows",
            f"{folder}: no conversations beside it ({beside}): its ids are not compared",
        )
        return
    wrong = [r for r in refs if r.row_id not in rows or r.ids().tolist() != rows[r.row_id].ids]
    lacking = rows.keys() - {r.row_id for r in refs}
    if wrong:
        yield error(
            "states-rows",
            f"{folder}: {len(wrong):,} rows are not those of {beside} (first: {wrong[0].row_id})",
            EXTRACT,
        )
    if lacking:
        yield error(
            "states-rows",
            f"{folder}: {len(lacking):,} rows of {beside} have no states (first: {min(lacking)})",
            EXTRACT,
        )


def _layers(
    folder: Path, about: dict[str, Any], refs: list[RowRef], target: Target | None
) -> Iterator[Finding]:
    ids = about.get("aux_layers")
    width = refs[0].load().aux_TLD.shape if refs else None
    if width is None:
        yield error("states-rows", f"{folder} holds no row", EXTRACT)
        return
    if ids is not None and len(ids) != width[1]:
        yield error(
            "states-layers",
            f"{folder}: the manifest names {len(ids)} aux layers {ids}, and the shards hold {width[1]}",
            EXTRACT,
        )
    if target and (width[2] != target.hidden or (ids and max(ids) > target.layers)):
        yield error("states-layers", f"{folder}: layers {ids} of width {width[2]}, and {target.folder} has {target.layers} layers of width {target.hidden}", EXTRACT,
        )  # fmt: skip


def _agreement(folder: Path, refs: list[RowRef], target: Target) -> Iterator[Finding]:
    """head(norm(last state)) against the argmax that the target itself gave: the last state is the input of the final norm, of this target."""
    import torch

    norm_D, head_VD = target.final_norm_D(), target.head_VD()
    seen = same = 0
    for ref in itertools.islice(refs, 64):
        row = ref.load()
        at = (row.top1_T >= 0).nonzero().flatten()
        at = at[(at < len(row) - 1) & (at >= row.last_from)] if len(at) > 1 else at[at >= row.last_from]
        for some in at[: SAMPLED_POSITIONS - seen].split(BLOCK):
            last = row.last_SD[some - row.last_from].float()
            last = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + target.eps) * norm_D
            same += int(((last @ head_VD.float().T).argmax(-1) == row.top1_T[some]).sum())
            seen += len(some)
        if seen >= SAMPLED_POSITIONS:
            break
    if not seen:
        yield unknown(
            "states-agreement",
            f"{folder}: no position has the target's own argmax to compare with",
            EXTRACT,
        )
        return
    said = f"{folder}: head(norm(last state)) has the target's own argmax at {same / seen:.2%} of {seen:,} positions"
    if same / seen < AGREES:
        yield error(
            "states-agreement",
            f"{said} (need {AGREES:.0%}): another layer, a state after the final norm, or another target",
            EXTRACT,
        )
    else:
        say(f"  {said}")
