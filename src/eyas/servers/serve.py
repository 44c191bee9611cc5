"""A run's target in vLLM, with its drafter or without: for the user until `eyas stop`, or for a stage while it works.

Reads the recipe, drafter/best and verdict.json; writes servers/NAME.log and the server's record (records.py).

    eyas serve RUN --set engine.name=vllm [--baseline] [--dry-run] [--port N]
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from eyas import contract
from eyas.engines import containers, vllm, vllm_loader
from eyas.engines.vllm import Installed, Keep, Serving
from eyas.errors import SurroundingsError, UsageError
from eyas.progress import duration, say, size
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json
from eyas.servers import host, launch, records
from eyas.servers.launch import Launch
from eyas.target import Decision

HOST = "127.0.0.1"
DEFAULT_K = 3


class Choice(NamedTuple):
    k: int
    reason: str


def plan(resolved: Resolved, rundir: RunDir, baseline: bool, port: int | None) -> tuple[Launch, Installed]:
    """What `eyas serve` would launch. Raises UsageError where the recipe has no server, or there is no drafter to serve."""
    if resolved.recipe.engine.name != "vllm":
        raise UsageError(
            f"engine.name is {resolved.recipe.engine.name}: the embedded engine has no server. Serve with --set engine.name=vllm"
        )
    if not resolved.target.files:
        raise UsageError(
            f"serve: {resolved.target.folder} is not on this machine; put the model there, or set target.model."
        )
    drafter = None if baseline else _drafter(rundir)
    chosen = Choice(0, "baseline") if baseline else _k(rundir)
    name = f"{resolved.recipe.name}{'-baseline' if baseline else ''}"
    engine = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command)
    say(f"engine    vLLM {engine.version} for {engine.device}, from {engine.origin}: {engine.python}")
    if note := vllm.untested(engine.version):
        say(f"          note: {note}")
    if drafter:
        say(f"drafter   {drafter}, k={chosen.k}: {chosen.reason}")
    return _launch(resolved, rundir, engine, name, chosen.k, drafter, port), engine


def _launch(
    resolved: Resolved,
    rundir: RunDir,
    engine: Installed,
    name: str,
    k: int,
    drafter: Path | None,
    port: int | None,
    keep: Path | None = None,
    connector: bool = False,
) -> Launch:
    options = resolved.recipe.engine
    if drafter:
        vllm_loader.refuse(engine.version, contract.read(drafter / "contract.json"))
    nonce = launch.new_nonce()
    serving = Serving(
        model=resolved.target.folder.resolve(), names=(resolved.recipe.name, nonce), host=HOST,
        port=port or launch.free_port(HOST), dtype=resolved.dtype, context=resolved.target.context, drafter=drafter, k=k,
        remote_code=resolved.recipe.target.trust_remote_code, args=tuple(options.args), env=dict(options.env), contained=containers.runtime(options.command) is not None,
        keep=Keep(keep.resolve(), (*resolved.aux_layers, resolved.target.layers), resolved.aux_dtype, connector) if keep else None,
    )  # fmt: skip
    env = vllm.environment(engine, serving)
    wrapper = containers.inside(options.command, env | {records.MARK: nonce}, nonce)
    return Launch(
        name=name, nonce=nonce, argv=[*wrapper, *vllm.command(engine, serving)], env={} if serving.contained else env, host=HOST,
        port=serving.port, model=resolved.recipe.name, log=(rundir.root / "servers" / f"{name}.log").resolve(),
        engine=f"vLLM {engine.version}", phases=vllm.PHASES, faults=vllm.FAULTS,
    )  # fmt: skip


class Running(NamedTuple):
    """A server of a stage."""

    url: str
    model: str
    engine: str  # with version and device
    lives: Callable[[], bool]  # whether any of its processes does


@contextlib.contextmanager
def running(
    resolved: Resolved,
    rundir: RunDir,
    role: str,
    k: int = 0,
    keep: Path | None = None,
    connector: bool = False,
) -> Iterator[Running]:
    """A server while a stage works, with k drafts of drafter/best or (k = 0) the target alone, which keeps states in the folder
    `keep`, if it is given (what lay there goes), through eyas's plugin or vLLM's own connector; stopped at the end, whatever happens.

    Raises SurroundingsError as launch.start does; one of the stage's own gets what the log of a dead server says.
    """
    clear_orphans()
    engine = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command)
    drafter = _drafter(rundir) if k else None
    made = _launch(
        resolved, rundir, engine, f"{resolved.recipe.name}-{role}", k, drafter, None, keep, connector
    )
    if keep:
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir(parents=True)
    preflight(made, engine, resolved)
    say(
        f"  starting vLLM {engine.version} ({engine.device}), {f'k={k}' if k else 'without drafter'}; log {made.log}"
    )
    began = time.monotonic()
    record = launch.start(made)
    say(f"  ready at {record.url} after {duration(time.monotonic() - began)}")
    try:
        yield Running(record.url, record.model, engine.label, lambda: bool(records.members(record)))
    except SurroundingsError as e:
        if launch.answers(record.url):
            raise
        raise SurroundingsError(f"{e} The server is no longer well: {launch.explain(made)}") from e
    finally:
        records.stop(record)


def keeps(resolved: Resolved) -> Decision:
    """Whether states are kept in the pass that generates, and why. Raises UsageError where the recipe asks for what cannot be."""
    engine, wanted = resolved.recipe.engine, resolved.recipe.extract.with_
    if engine.name == "hf":
        why: str | None = "the embedded engine reads the stored ids in a pass of its own"
    elif engine.url:
        why = "the server at engine.url is not eyas's own"
    else:
        why = cannot_keep(resolved)
    if wanted == "generate" and why:
        raise UsageError(
            f"extract.with is generate, and states cannot be kept: {why}. Set extract.with to auto or pass."
        )
    if wanted == "pass":
        return Decision(False, "the recipe says so (extract.with)")
    return Decision(why is None, why or "vLLM and eyas's plugin can (no second reading)")


def cannot_keep(resolved: Resolved) -> str | None:
    """Why the vLLM that eyas would start cannot keep states, or None. Raises SurroundingsError where there is none."""
    engine = resolved.recipe.engine
    found = vllm.find(engine.python, engine.command)
    return vllm.cannot_keep(found, containers.runtime(engine.command) is not None)


def cannot_connect(resolved: Resolved) -> str | None:
    """Why vLLM's own connector cannot read the states of stored ids, or None. Raises SurroundingsError where there is no vLLM."""
    engine = resolved.recipe.engine
    found = vllm.find(engine.python, engine.command)
    contained = containers.runtime(engine.command) is not None
    return vllm.cannot_connect(found, contained, resolved.target.latent)


def fit_together(resolved: Resolved, count: int) -> Decision:
    """Whether `count` servers of this target can stand side by side."""
    engine = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command)
    if engine.device == "cuda":
        share = host.share(resolved.recipe.engine.args)
        used = max((card.used_mib / card.total_mib for card in host.gpus()), default=0.0)
        return Decision(
            used + count * share <= 1,
            f"each takes {share:.0%} of a GPU's memory (--gpu-memory-utilization), and {1 - used:.0%} are free",
        )
    need = count * host.memory_need(*_memory(resolved))
    free = psutil.virtual_memory().available
    return Decision(need <= free, f"they need some {size(need)} of memory, and {size(free)} are free")


def _memory(resolved: Resolved) -> tuple[int, int]:
    """Bytes of weights and of the key/value cache of a server on a CPU."""
    gib = resolved.recipe.engine.env.get("VLLM_CPU_KVCACHE_SPACE", str(vllm.CPU_CACHE_GIB))
    cache = host.number("engine.env: VLLM_CPU_KVCACHE_SPACE", gib) * 2**30
    return resolved.weight_bytes, round(cache)


def _drafter(rundir: RunDir) -> Path:
    folder = rundir / "drafter" / "best"
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is not there: train a drafter first, or serve the target alone with --baseline"
        )
    return folder.resolve()


def _k(rundir: RunDir) -> Choice:
    path = rundir / "verdict.json"
    best = read_json(path).get("best_k") if path.is_file() else None
    if best:
        return Choice(best, "the best of this run's verdict")
    return Choice(DEFAULT_K, "no verdict yet; what most serve with")


def preflight(made: Launch, engine: Installed, resolved: Resolved) -> None:
    """Look at the machine first. Raises SurroundingsError naming what is missing and what would fit."""
    launch.refuse_taken(made.host, made.port)
    host.refuse_full_disks(made.log)
    if engine.device == "cuda":
        host.refuse_taken_gpus(host.gpus(), made.argv)
        return
    host.refuse_small_memory(*_memory(resolved))


def serve(
    resolved: Resolved, rundir: RunDir, baseline: bool, port: int | None, ready_s: float
) -> records.Record:
    """Start a server that stays until `eyas stop`; returns its record."""
    clear_orphans()
    made, engine = plan(resolved, rundir, baseline, port)
    preflight(made, engine, resolved)
    say(f"starting  {made.shown()}")
    say(f"log       {made.log}")
    record = launch.keep(launch.start(made, ready_s))
    say(f"ready     {record.url} (model {record.model}); stop it with: eyas stop {record.name}")
    return record


def clear_orphans() -> None:
    """Stop what an eyas that was killed has left."""
    for record in records.sweep():
        say(f"stopped {record.name} ({record.url}), left by an eyas that was killed")
