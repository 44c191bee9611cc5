"""eyas serve: a run's target, with its drafter or without, in vLLM.

Reads the recipe, drafter/best and verdict.json; writes servers/NAME.log and the server's record (records.py).

    eyas serve RUN --set engine.name=vllm [--baseline] [--dry-run] [--port N]
"""

from pathlib import Path
from typing import NamedTuple

from eyas.engines import vllm
from eyas.engines.vllm import Installed, Serving
from eyas.errors import UsageError
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json
from eyas.servers import host, launch, records
from eyas.servers.launch import Launch

HOST = "127.0.0.1"
DEFAULT_K = 3


class Choice(NamedTuple):
    k: int
    reason: str


def plan(resolved: Resolved, rundir: RunDir, baseline: bool, port: int | None) -> tuple[Launch, Installed]:
    """What would be launched. Raises UsageError where the recipe has no server, or there is no drafter to serve."""
    options, target = resolved.recipe.engine, resolved.target
    if options.name != "vllm":
        raise UsageError(
            f"engine.name is {options.name}: the embedded engine has no server. Serve with --set engine.name=vllm"
        )
    if not target.files:
        raise UsageError(
            f"serve: {target.folder} is not on this machine; put the model there, or set target.model."
        )
    drafter = None if baseline else _drafter(rundir)
    engine = vllm.find(options.python)
    chosen = Choice(0, "baseline") if baseline else _k(rundir)
    name = f"{resolved.recipe.name}{'-baseline' if baseline else ''}"
    nonce = launch.new_nonce()
    serving = Serving(
        model=target.folder.resolve(),
        names=(resolved.recipe.name, nonce),
        host=HOST,
        port=port or launch.free_port(HOST),
        dtype=resolved.dtype,
        context=target.context,
        drafter=drafter,
        k=chosen.k,
        args=tuple(options.args),
        env=dict(options.env),
        wrapper=tuple(options.command),
    )
    say(f"engine    vLLM {engine.version} for {engine.device}, from {engine.origin}: {engine.python}")
    if note := vllm.untested(engine.version):
        say(f"          note: {note}")
    if drafter:
        say(f"drafter   {drafter}, k={chosen.k}: {chosen.reason}")
    made = Launch(
        name=name,
        nonce=nonce,
        argv=vllm.command(engine, serving),
        env=vllm.environment(engine, serving),
        host=HOST,
        port=serving.port,
        model=resolved.recipe.name,
        log=(rundir.root / "servers" / f"{name}.log").resolve(),
        engine=f"vLLM {engine.version}",
        phases=vllm.PHASES,
        faults=vllm.FAULTS,
    )
    return made, engine


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
    weights = sum(p.stat().st_size for p in set(resolved.target.files.values()))
    wider = resolved.dtype == "float32" and resolved.target.config.get("dtype") == "bfloat16"
    cache_gib = host.number("engine.env: VLLM_CPU_KVCACHE_SPACE", made.env["VLLM_CPU_KVCACHE_SPACE"])
    host.refuse_small_memory(weights * (2 if wider else 1), round(cache_gib * 2**30))


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
