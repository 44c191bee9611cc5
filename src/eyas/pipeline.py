"""The life of a drafter: the stages in order, what each is made from, and when one can be skipped.

    plan -> generate -> extract -> train -> check -> bench -> verdict -> report

A stage whose manifest names the same inputs as the recipe now does is skipped. Where they differ, cheap stages are
redone and costly ones refused by name, until the user says `--from STAGE`. A stage that was killed resumes.
"""

import contextlib
import importlib
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eyas import __version__, interrupt, profiles, recipe, target, warm
from eyas.drafter.dialects import LATENT_KEYS
from eyas.errors import RecipeError, SurroundingsError, UsageError
from eyas.progress import duration, say
from eyas.recipe import Recipe, Resolved, Value
from eyas.rundir import RunDir, file_hash, fingerprint, read_json, write_json, write_text


class Stage(NamedTuple):
    name: str
    needs: tuple[str, ...]  # stages whose artifacts it reads
    keys: tuple[str, ...]  # recipe keys or sections that decide its result
    costly: bool  # refused when stale; cheap ones are redone
    free: tuple[str, ...] = ()  # keys under them that change nothing of the result
    kept: tuple[str, ...] = ()  # those whose change leaves what is there valid: the stage goes on with it


STAGES = (
    Stage(
        "plan",
        (),
        ("target.facts", "engine.name", "prompts", "generate", "extract", "train", "bench"),
        costly=False,
    ),
    Stage(
        "generate",
        (),
        ("engine.name", "prompts", "generate"),
        costly=True,
        free=("generate.concurrency", "generate.endpoints", "generate.answer_s"),
        kept=("prompts", "generate.samples"),
    ),
    Stage("extract", ("generate",), ("engine.name", "extract"), costly=True),
    Stage("train", ("generate", "extract"), ("train",), costly=True),
    Stage("check", ("train",), (), costly=False),
    Stage(
        "bench",
        ("generate", "extract", "train"),
        ("engine.name", "engine.args", "engine.env", "bench", "verdict.confidence"),
        costly=True,
    ),
    Stage("verdict", ("train", "bench"), ("verdict",), costly=False),
    Stage("report", (), (), costly=False),
)
OUT_OF_MEMORY = "can't allocate memory"  # PyTorch's words on the CPU
MEMORY_KNOB = {
    "generate": "Lower generate.concurrency or generate.max_tokens.",
    "train": "Lower train.micro_tokens, then train.draft_vocab.",
    "bench": "Lower bench.max_tokens.",
}
NAMES = tuple(s.name for s in STAGES)
BY_NAME = {s.name: s for s in STAGES}


def open_run(word: str, sets: tuple[str, ...], run: str | None) -> tuple[Resolved, RunDir, dict[str, Value]]:
    """Resolve RECIPE or RUN, and the folder it works in (made here).

    Raises RecipeError, or UsageError where the target cannot be used.
    """
    path = recipe.find(word)
    read, values = recipe.read(path, sets)
    root = Path(run) if run else Path(word) if Path(word).is_dir() else Path("runs") / read.name
    return resolve(read, values), RunDir(root), values


def resolve(read: Recipe, values: dict[str, Value]) -> Resolved:
    """Derive what the recipe left `auto`, each with a reason that is printed and recorded."""
    from eyas.engines import hf

    sizes, folder = read.target.facts, Path(read.target.model)
    if sizes and not folder.is_dir():
        facts = target.from_facts(folder, sizes.model_dump())
    else:
        facts = target.load(folder)
    read = warm.settle(read, values, facts)
    _refuse_architecture(read, facts)
    device = hf.choose_device()
    dtype = hf.choose_dtype(read.target.dtype, device.value)
    if read.target.aux_layers == "auto":
        layers = facts.default_aux_layers()
    else:
        reason = values["target.aux_layers"].reason if read.train.init_from else "the recipe says so"
        layers = target.Decision(facts.check_aux_layers(list(read.target.aux_layers)), reason)
    for key, (value, reason) in {
        "target.dtype": dtype,
        "target.aux_layers": layers,
        "device": device,
    }.items():
        source = values[key].source if key in values and values[key].value != "auto" else "derived"
        values[key] = Value(value, source, reason)
    if read.engine.name == "hf":
        reason = "the embedded engine extracts by a pass over the stored ids"
        values["extract.with"] = Value("pass", "derived", reason)
    return Resolved(read, facts, device.value, dtype.value, layers.value)


def _refuse_architecture(read: Recipe, facts: target.Target) -> None:
    if read.train.architecture != "mla":
        return
    lacking = [n for n in LATENT_KEYS[1:] if not isinstance(facts.config.get(n), int)]
    if lacking:
        raise RecipeError(
            f'"train.architecture" is mla, and {facts.folder} has no latent attention whose widths it could take (its config does not '
            f"state {', '.join(lacking)}). Leave the key out."
        )
    if read.train.norms.qk:
        raise RecipeError(
            '"train.norms.qk": a drafter with latent attention has no norms of queries and keys'
        )


def _refuse_broken_parent(resolved: Resolved) -> None:
    """Raises RecipeError, before anything costs time, with every error that eyas check finds in the parent."""
    word = resolved.recipe.train.init_from
    if word is None:
        return
    from eyas.check import stage

    path = recipe.find_drafter(word)
    found, _ = stage.check(path, resolved.target)
    bad = [f"[{f.rule}] {f.message}" for f in found if f.severity == "error"]
    if bad:
        raise RecipeError(
            f'"train.init_from": {word}: {"; ".join(bad[:6])}. eyas check {path if path.is_dir() else path.parent} says more.'
        )


def introduce(resolved: Resolved, rundir: RunDir) -> None:
    """Say what will be worked on, with the reason of each derived value."""
    t = resolved.target
    say(
        f"target    {t.folder} ({t.identity}; {t.model_type}, {t.layers} layers, width {t.hidden}, vocabulary {t.vocab:,})"
    )
    say(f"run       {rundir.root}")


def prepare(resolved: Resolved, rundir: RunDir, values: dict[str, Value]) -> None:
    """Write recipe.yaml, resolved.json and the head of run.json; print the derived values."""
    introduce(resolved, rundir)
    _refuse_broken_parent(resolved)
    for key in ("device", "target.dtype", "target.aux_layers"):
        say(f"{key.rpartition('.')[2]:<9} {values[key].value}: {values[key].reason}")
    given = warm.without_inherited(resolved.recipe.model_dump(mode="json", by_alias=True), values)
    write_text(rundir / "recipe.yaml", yaml.safe_dump(given, sort_keys=False, allow_unicode=True))
    write_json(rundir / "resolved.json", {k: v._asdict() for k, v in values.items()})
    path = rundir / "run.json"
    run = read_json(path) if path.is_file() else {"stages": {}}
    write_json(
        path, run | {"eyas": __version__, "name": resolved.recipe.name, "machine": machine(), "git": _git()}
    )


def machine() -> dict[str, Any]:
    """Hardware and versions that figures depend on."""
    import psutil

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: metadata.version(name) for name in ("torch", "transformers", "safetensors", "pyarrow")
        },
    }


def _git() -> str | None:
    """The commit that eyas itself is run from, when it is run from a checkout."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def inputs_of(stage: Stage, resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Everything that decides a stage's result, by name, with values short enough to show when they differ."""
    out: dict[str, Any] = {"target": resolved.target.fingerprint, "target.dtype": resolved.dtype}
    if stage.name not in ("generate", "plan"):
        out["target.aux_layers"] = resolved.aux_layers
    for key, value in recipe.flat(resolved.recipe).items():
        if _under(key, stage.keys) and key not in stage.free:
            out[key] = value
    if "prompts" in stage.keys:
        from eyas.generate import sources

        out["prompts.sources"] = [
            " ".join(
                [
                    *(f"{k} {v}" for k, v in s.model_dump(by_alias=True, exclude_defaults=True).items()),
                    *map(_of_file, sources.files(s)),
                ]
            )
            for s in resolved.recipe.prompts.sources
        ]
        if tools := resolved.recipe.generate.tools:
            out["generate.tools"] = f"{tools} {_of_file(Path(tools.rpartition(':')[0]))}"
        out["prompts.keep_out"] = [f"{p} {_of_file(Path(p))}" for p in resolved.recipe.prompts.keep_out]
    if "train" in stage.keys and resolved.recipe.train.init_from:
        word = resolved.recipe.train.init_from
        out["train.init_from"] = f"{word} {warm.content(word)}"
    for name in stage.needs:
        out[name] = rundir.manifest(name)["fingerprint"]
    if stage.name == "verdict" and (rundir / profiles.FILE).is_file():
        out["profile"] = _of_file(rundir / profiles.FILE)
    return out


def _under(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == s or key.startswith(f"{s}.") for s in sections)


def _of_file(path: Path) -> str:
    return fingerprint(file_hash(path)) if path.is_file() else "missing"


def stale(stage: Stage, resolved: Resolved, rundir: RunDir) -> list[str]:
    """Why a stage's artifacts no longer fit the recipe; the report is never stale, since it is always written anew."""
    return (
        []
        if stage.name == "report"
        else [*rundir.differences(stage.name, inputs_of(stage, resolved, rundir)).values()]
    )


def refused(stage: Stage, resolved: Resolved, rundir: RunDir) -> list[str]:
    """Of the differences, those with which a costly stage cannot go on."""
    differences = rundir.differences(stage.name, inputs_of(stage, resolved, rundir))
    return [said for key, said in differences.items() if not _under(key, stage.kept)]


def work(stage: Stage, resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Run one stage, or skip it when it is finished and fresh; returns its manifest.

    Raises StaleError when a costly stage's artifacts were made from other inputs.
    """
    if not resolved.target.files and stage.name != "plan":
        raise UsageError(
            f"{stage.name}: {resolved.target.folder} is not on this machine; target.facts is enough for plan alone. "
            "Put the model there, or set target.model."
        )
    inputs = inputs_of(stage, resolved, rundir)
    differences = {} if stage.name == "report" else rundir.differences(stage.name, inputs)
    if differences and stage.costly:
        if hard := refused(stage, resolved, rundir):
            rundir.refuse_stale(stage.name, hard)
        say(
            f"{stage.name}: goes on with what is there and still wanted, since {'; '.join(differences.values())}"
        )
        rundir.reopen(stage.name)
    elif differences:
        say(f"{stage.name}: redone, since {'; '.join(differences.values())}")
        rundir.clear(stage.name)
    elif stage.name != "report" and rundir.finished(stage.name):
        say(f"{stage.name}: done already")
        return rundir.manifest(stage.name)
    say(f"{stage.name}: {'resuming' if rundir.started(stage.name) and stage.costly else 'starting'}")
    rundir.update_record(stage.name, inputs=inputs, state="running")
    began = time.monotonic()
    if stage.name == "train":
        from eyas.train import group

        group.current().begin()
    with surroundings(stage.name):
        manifest = _runner(stage.name)(resolved, rundir)
    seconds = time.monotonic() - began
    rundir.update_record(stage.name, state="done", seconds=round(seconds, 2), rates=manifest.get("rates"))
    say(f"{stage.name}: done in {duration(seconds)}")
    return manifest


@contextlib.contextmanager
def surroundings(stage: str) -> Iterator[None]:
    """What the machine refuses, in a user's words: memory with the key that lowers it, disk with the file."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not (
            isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError" or OUT_OF_MEMORY in str(e)
        ):
            raise
        raise SurroundingsError(
            f"{stage}: out of memory ({' '.join(str(e).split())[:200]}). {MEMORY_KNOB.get(stage, 'Use a larger machine.')} "
            "What was finished is kept."
        ) from e
    except OSError as e:
        if isinstance(e, FileNotFoundError):
            raise
        raise SurroundingsError(
            f"{stage}: {e.strerror or e}{f' ({e.filename})' if e.filename else ''}. Free space or mend the folder, and type "
            "the same command again: what was finished is kept."
        ) from e


def _runner(name: str) -> Callable[[Resolved, RunDir], dict[str, Any]]:
    """The stage's function, imported only now: each brings its own heavy libraries."""
    if name == "plan":  # no stage imports another: plan is handed the prompts that generate will read
        from eyas.generate import prompts
        from eyas.plan import stage

        def planned(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
            known = prompts.read(resolved.recipe.prompts).prompts if resolved.target.files else []
            return stage.run(resolved, rundir, known)

        return planned
    return importlib.import_module(f"eyas.{name}.stage").run


def run(
    word: str, sets: tuple[str, ...], folder: str | None, first: str | None = None, last: str | None = None
) -> dict[str, dict[str, Any]]:
    """The whole life, or the part from `first` (redone, with all that follows) until `last`; manifests by stage."""
    end = NAMES.index(last) if last else len(NAMES) - 1
    start = NAMES.index(first) if first else 0
    if start > end:
        raise UsageError(f"--from {first} comes after --until {last}: the stages are {', '.join(NAMES)}")
    from eyas.train import group

    with group.joined("run"):  # refuses torchrun
        resolved, rundir, values = open_run(word, sets, folder)
    with rundir.lock(), interrupt.patient():
        rundir.sweep()
        if first:
            for stage in STAGES[start:][::-1]:
                rundir.clear(stage.name)
        prepare(resolved, rundir, values)
        return {stage.name: work(stage, resolved, rundir) for stage in STAGES[: end + 1]}


def run_one(name: str, word: str, sets: tuple[str, ...], folder: str | None) -> dict[str, Any]:
    """One stage by itself; what it needs must be there and fresh. `train` may be one of several processes (train/group.py): the
    first does all this, the others only train, and return nothing."""
    from eyas.train import group

    with group.joined(name) as mine:
        if mine.leads:
            return _alone(name, word, sets, folder)
        with interrupt.patient(), surroundings(name):
            resolved, rundir, _ = open_run(word, sets, folder)
            if mine.begin():
                _runner(name)(resolved, rundir)
        return {}


def _alone(name: str, word: str, sets: tuple[str, ...], folder: str | None) -> dict[str, Any]:
    resolved, rundir, values = open_run(word, sets, folder)
    with rundir.lock(), interrupt.patient():
        prepare(resolved, rundir, values)
        for needed in BY_NAME[name].needs:
            differences = stale(BY_NAME[needed], resolved, rundir)
            if differences and rundir.finished(needed):
                rundir.refuse_stale(needed, differences)
        return work(BY_NAME[name], resolved, rundir)
