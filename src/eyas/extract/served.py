"""States that a serving engine has kept: in the pass that generated (extract.with generate), or in a pass over the stored ids.

Reads conversations/ and, of the first, conversations/states/. Writes states/shard-*.safetensors. Every shard is checked before it is
taken over: finite, the ids of the conversations, head(norm(last state)) from the weights on disk against the engine's own argmax, and
greedy answers against it. A few rows are computed by the embedded engine too, where the target fits beside.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from eyas import interrupt
from eyas.causes import NEAR_TIE
from eyas.engines.hf import HFEngine
from eyas.errors import ContractError, EyasError
from eyas.extract.head import Checker, Extracted, described, own_logits
from eyas.progress import Progress, say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, atomic, read_json
from eyas.servers import connector, reading, serve
from eyas.stores import likeness, states
from eyas.stores.conversations import Row
from eyas.stores.states import RowRef, RowStates
from eyas.stores.steps import NO_ID, Steps

KEPT = Path("conversations") / "states"
LOGITS_TOKENS = {"cpu": 1024, "cuda": 16384}
HASHERS = 4
COMPARED_ROWS, COMPARED_TOKENS = 6, 512
COMPARED_BYTES = 1.5  # times the weights must be free to load the target beside


def kept(resolved: Resolved, rundir: RunDir) -> str | None:
    """Why the states that generate kept cannot be taken, or None where they can."""
    path = rundir / str(KEPT / "kept.json")
    if not path.is_file():
        return "none were kept"
    about = read_json(path)
    wanted = {
        "aux_layers": resolved.aux_layers,
        "dtype": resolved.dtype,
        "aux_dtype": resolved.recipe.extract.dtype,
    }
    for name, value in wanted.items():
        if about[name] != value:
            return f"those that were kept have {name} {about[name]}, and the recipe has {value}"
    return None


def take(resolved: Resolved, rundir: RunDir, rows: list[Row], checker: Checker) -> Extracted:
    """Check the kept shards and move them to states/.

    Raises ContractError where a row is missing, is another one, or a check fails.
    """
    began = time.perf_counter()
    folder, source = rundir / "states", rundir / str(KEPT)
    folder.mkdir(exist_ok=True)
    by_id, counts, paths = {r.row_id: r for r in rows}, Counter[str](), []
    seen: set[str] = set()
    names = sorted({p.name for f in (source, folder) for p in f.glob("part-*.safetensors")})
    with Progress("extract", sum(len(r.ids) for r in rows), "tokens") as progress:
        for name in names:
            interrupt.safe_place()
            if (source / name).is_file():
                (source / name).replace(folder / name)
            counts.update(check(folder / name, by_id, checker, resolved.device))
            refs = states.rows_of(folder / name)
            seen.update(r.row_id for r in refs)
            paths.append(folder / name)
            progress.add(sum(len(r) for r in refs))
    if lacking := by_id.keys() - seen:
        raise ContractError(
            f"{folder}: the states of {len(lacking):,} rows are missing ({min(lacking)} and others). Extract again with --from extract."
        )
    about = read_json(source / "kept.json")["likeness"]
    tokens, seconds = sum(len(r.ids) for r in rows), time.perf_counter() - began
    return Extracted(_described(paths), counts, about | _beside(resolved, paths), tokens, seconds)


Read = Callable[
    [list[Row]], list[RowStates]
]  # of a group of rows; what the engine kept of them is gone afterwards


def read_again(
    resolved: Resolved, rundir: RunDir, rows: list[Row], checker: Checker, own: bool = False
) -> Extracted:
    """A pass over the stored ids in vLLM, each row a prompt, through the plugin or (own) vLLM's connector; resumes after the last
    complete shard."""
    folder, made, began = rundir / "states", 0, time.perf_counter()
    by_id, counts, paths = {r.row_id: r for r in rows}, Counter[str](), []
    with contextlib.ExitStack() as stack:
        begin = partial(_by_connector if own else _by_plugin, stack, resolved, rundir)
        read: Read | None = None
        progress = stack.enter_context(Progress("extract", sum(len(r.ids) for r in rows), "tokens"))
        per_token = resolved.token_bytes
        for number, group in enumerate(states.groups(rows, resolved.recipe.extract.shard_bytes, per_token)):
            interrupt.safe_place()
            path = folder / f"shard-{number:05d}.safetensors"
            tokens = sum(len(r.ids) for r in group)
            if path.is_file():
                progress.done += tokens
                progress.first += tokens
            else:
                read = read or begin()
                done = read(group)
                with atomic(path) as tmp:
                    states.write_shard(tmp, done, {}, resolved.fp8)
                progress.add(tokens)
                made += tokens
            paths.append(path)
    seconds = time.perf_counter() - began
    for path in paths:
        counts.update(check(path, by_id, checker, resolved.device))
    return Extracted(_described(paths), counts, _beside(resolved, paths), made, seconds)


def _described(paths: list[Path]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(HASHERS) as pool:
        return list(pool.map(described, paths))


def _by_plugin(stack: contextlib.ExitStack, resolved: Resolved, rundir: RunDir) -> Read:
    folder = rundir / "states" / "steps"
    server = stack.enter_context(serve.running(resolved, rundir, "extract", keep=folder))
    steps = Steps.opened(folder)

    def read(group: list[Row]) -> list[RowStates]:
        reading.read(server.url, server.model, [(r.row_id, r.ids) for r in group])
        steps.wait({r.row_id: len(r.ids) for r in group})
        done = [steps.row(r.row_id, r.ids, len(r.prompt_ids), len(r.ids)) for r in group]
        steps.forget([r.row_id for r in group])
        return done

    return read


def _by_connector(stack: contextlib.ExitStack, resolved: Resolved, rundir: RunDir) -> Read:
    folder = rundir / "states" / "steps"
    server = stack.enter_context(serve.running(resolved, rundir, "extract", keep=folder, connector=True))
    dtype = getattr(torch, resolved.aux_dtype)

    def read(group: list[Row]) -> list[RowStates]:
        named = [(r.row_id, torch.tensor(r.ids), len(r.prompt_ids)) for r in group]
        return connector.read(server.url, server.model, folder, named, dtype)

    return read


def check(path: Path, rows: dict[str, Row], checker: Checker, device: str) -> Counter[str]:
    """Counts of one shard's checks; where the engine computed no logits, top1 of supervised positions is filled in.

    Raises ContractError for states that are not finite, and for rows of other conversations.
    """
    refs = states.rows_of(path)
    counts = Counter[str]()
    filled = states.load(path, "top1").clone()
    before = filled.clone()
    for ref in refs:
        row = rows.get(ref.row_id)
        one = ref.load()
        if row is None or one.ids_T.tolist() != row.ids or one.start != len(row.prompt_ids):
            raise ContractError(
                f"{path}: row {ref.row_id} is not that of conversations/. Extract again with --from extract."
            )
        if not bool(one.aux_TLD.isfinite().all() and one.last_SD.isfinite().all()):
            raise ContractError(
                f"row {ref.row_id} (prompt {row.prompt_id}): its states are not finite. Try --set target.dtype=float32."
            )
        counts.update(_count(one, row, filled[ref.begin : ref.end], checker, device))
    if not torch.equal(filled, before):
        states.replace_top1(path, filled)
    return counts


def _count(one: RowStates, row: Row, top1_T: Tensor, checker: Checker, device: str) -> Counter[str]:
    """Checks of one row at the positions that decide its answer's tokens; fills top1_T there where it has none."""
    n = len(row.ids)
    at = torch.arange(max(one.start - 1, 0), n if int(top1_T[-1]) != NO_ID else n - 1)
    counts = Counter[str]()
    following = torch.tensor([*row.ids[1:], NO_ID])
    for some in at.split(LOGITS_TOKENS[device]):
        logits = own_logits(checker, one.last_SD[some - one.last_from].to(device))
        best, top = logits.float().topk(2).values, logits.argmax(-1).cpu()
        ulp = best[:, 0].abs().clamp_min(1e-6).log2().floor().exp2() * torch.finfo(logits.dtype).eps
        near = (best[:, 0] - best[:, 1] <= ulp.clamp_min(NEAR_TIE)).cpu()
        own = top1_T[some].long()
        known = own != NO_ID
        differs = known & (own != top)
        top1_T[some[~known]] = top[~known].to(top1_T.dtype)
        counts.update(
            positions=int(known.sum()),
            head_agrees=int((known & (~differs | near)).sum()),
            disk_differs=int((differs & ~near).sum()),
            disk_near_ties=int((differs & near).sum()),
        )
        if row.temperature == 0:
            inside = some < n - 1
            same = top1_T[some].long() == following[some]
            counts.update(
                greedy_positions=int(inside.sum()),
                greedy_agrees=int((inside & same).sum()),
                greedy_near_ties=int((inside & ~same & near).sum()),
            )
    return counts


def _beside(resolved: Resolved, paths: list[Path]) -> dict[str, Any]:
    """Some rows against the embedded engine on the same ids. Raises ContractError where they are not the same."""
    target = resolved.target
    free = torch.cuda.mem_get_info()[0] if resolved.device == "cuda" else psutil.virtual_memory().available
    why = None
    if resolved.weight_bytes * COMPARED_BYTES > free:
        why = "the target does not fit into the memory that is free"
    else:
        try:
            code = resolved.recipe.target.trust_remote_code
            engine = HFEngine(target, resolved.dtype, resolved.device, resolved.aux_layers, code)
        except EyasError as e:
            why = str(e)
    if why:
        say(f"  states were not compared with the embedded engine's: {why}")
        return {"against_embedded": None}
    found = likeness.compare([_pair(engine, ref) for ref in _some(paths)], resolved.aux_layers)
    if found is None:
        say("  states were not compared with the embedded engine's: no row is long enough")
        return {"against_embedded": None}
    if wrong := likeness.differs(found):
        raise ContractError(
            f"states: {wrong}, against the embedded engine on the same ids. Training on them would be silently wrong."
        )
    say(f"  states against the embedded engine on the same ids: {likeness.shown(found)}")
    return {"against_embedded": found}


def _some(paths: list[Path]) -> Iterator[RowRef]:
    """The longest rows of the first shards that are not too long for a quick look."""
    left = COMPARED_ROWS
    for path in paths:
        fitting = sorted((r for r in states.rows_of(path) if 8 <= len(r) <= COMPARED_TOKENS), key=len)
        yield from fitting[-left:]
        left -= len(fitting[-left:])
        if left <= 0:
            return


@torch.inference_mode()
def _pair(engine: HFEngine, ref: RowRef) -> tuple[states.RowStates, states.RowStates, range]:
    found = ref.load()
    seen = engine.states([found.ids_T.tolist()])
    other = states.RowStates(
        found.row_id, found.ids_T, seen.aux_BTLD[0].cpu(), seen.last_BTD[0].cpu(), seen.top1_BT[0].cpu(), found.start
    )  # fmt: skip
    return found, other, range(1, len(found) - 1)
