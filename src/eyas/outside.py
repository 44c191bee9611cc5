"""Measurements outside of a run's life: running servers, what drafting will cost, what weights were trained for, a verdict on anybody's
bench.json.

eyas bench --url U --baseline U        eyas plan RECIPE --profile        eyas check DRAFTER --probe        eyas verdict BENCH.json
"""

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas import interrupt, profiles, recipe
from eyas.causes import Finding, healthy
from eyas.errors import UsageError
from eyas.pipeline import open_run, run_one, surroundings
from eyas.progress import say
from eyas.recipe import Recipe
from eyas.rundir import RunDir, read_json, write_json
from eyas.schema import PromptsSection
from eyas.target import Target

if TYPE_CHECKING:
    from eyas.check.probing import Prompt


def profile(word: str, sets: tuple[str, ...], folder: str | None) -> dict[str, Any]:
    """The plan, and what drafting will cost, measured with an untrained drafter; profile.json under "profile"."""
    from eyas.bench import profile as profiling
    from eyas.generate import prompts

    plan = run_one("plan", word, sets, folder)
    resolved, rundir, _ = open_run(word, sets, folder)
    if not resolved.target.files:
        raise UsageError(
            f"plan --profile: {resolved.target.folder} is not on this machine, and it must be served to be measured."
        )
    with rundir.lock(), interrupt.patient(), surroundings("plan"):
        say("profile: the target plain, and with an untrained drafter of the recipe's shape")
        found = profiling.run(resolved, rundir, prompts.read(resolved.recipe.prompts)[0])
        for line in profiles.lines(found):
            say(f"  {line}")
    return plan | {"profile": found}


def probe(
    folder: Path,
    target: Target,
    on: Path | None,
    url: str | None = None,
    dtype: str = "auto",
    remote_code: bool = False,
) -> tuple[list[Finding], dict[str, Any]]:
    """What the weights in a drafter's folder were trained for (check/probing.py), on the answers in `on` or on answers written now to
    prompts that ship with eyas; with `url`, whether that server accepts what the replay of its answers says (check/parity.py)."""
    from eyas.check import parity, probing

    place = probing.Place(dtype, remote_code)
    if url:
        return parity.look(folder, target, url, held_out_prompts(), place)
    return probing.look(folder, target, on, held_out_prompts, place)


def held_out_prompts() -> "list[Prompt]":
    """Prompts that ship with eyas and of which no drafter that ships has learned, evenly over their domains."""
    from eyas.check import probing
    from eyas.generate import prompts
    from eyas.stores import conversations

    known = [p for p in prompts.read(PromptsSection())[0] if p.held_out]
    chosen = conversations.spread(known, probing.CONVERSATIONS, lambda p: p.domain)
    return [
        probing.Prompt(p.prompt_id, [*_system(p.system), {"role": "user", "content": p.turns[0]}])
        for p in chosen
    ]


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def probe_run(word: str, sets: tuple[str, ...], folder: str | None, url: str | None) -> dict[str, Any]:
    """check of a run, and the probe of its drafter on its held-out conversations, or of a server that has it; leaves probe.json, or
    parity.json, beside check.json."""
    from eyas.engines import reading

    made = run_one("check", word, sets, folder)
    resolved, rundir, _ = open_run(word, sets, folder)
    with rundir.lock(), interrupt.patient(), surroundings("check"):
        large = reading.too_large(resolved.target, resolved.dtype, resolved.device)
        on, code = rundir / ("states" if large else "conversations"), resolved.recipe.target.trust_remote_code
        found, body = probe(rundir / "drafter" / "best", resolved.target, on, url, resolved.dtype, code)
        write_json(rundir / ("parity.json" if url else "probe.json"), body)
    return with_probe(made, found, body, "parity" if url else "probe")


def with_probe(made: dict[str, Any], found: list[Finding], body: dict[str, Any], name: str) -> dict[str, Any]:
    """A check's result with what the probe adds; prints its findings."""
    from eyas.check.stage import show

    show(found)
    return made | {
        "findings": [*made["findings"], *(f.as_json() for f in found)],
        "healthy": made["healthy"] and healthy(found),
        name: body,
    }


def _served_recipe(word: str | None, sets: tuple[str, ...]) -> Recipe:
    """The recipe whose bench, prompts and verdict sections a measurement of running servers takes; defaults without one."""
    if word:
        return recipe.read(recipe.find(word), (*sets, "engine.name=vllm"))[0]
    default = {
        "name": "bench",
        "target": {"model": "none"},
        "engine": {"name": "vllm"},
        "bench": {"limit": 24},
    }
    return recipe.build(default, "--set", sets)[0]


def bench_url(
    url: str, baseline: str | None, word: str | None, sets: tuple[str, ...], folder: str | None
) -> dict[str, Any]:
    """Measure servers that run already; leaves bench.json and its rows in a folder of its own."""
    from eyas.bench import remote
    from eyas.generate import prompts
    from eyas.stores import conversations

    for name, value in (("--url", url), ("--baseline", baseline)):
        if value and not value.startswith(("http://", "https://")):
            raise UsageError(f"{name} {value}: write it as http://host:port")
    options = _served_recipe(word, sets)
    known = [
        p for p in prompts.read(options.prompts)[0] if p.held_out
    ]  # the other side may have taught the drafter
    if not known:
        raise UsageError(
            "bench: the recipe's prompts are all to be written by the target; give a file of prompts"
        )
    wanted = {
        "servers": [url, baseline],
        **options.model_dump(mode="json", include={"bench", "prompts", "generate"}),
    }
    rundir = _bench_folder(folder, url, wanted)
    with rundir.lock(), interrupt.patient(), surroundings("bench"):
        write_json(rundir / "servers.json", wanted)
        chosen = conversations.spread(known, options.bench.limit, lambda p: p.domain)
        return remote.run(url, baseline, chosen, options, rundir)


def _bench_folder(folder: str | None, url: str, wanted: dict[str, Any]) -> RunDir:
    """The named folder, or the first runs/bench-HOST-PORT-N that holds nothing, or the same measurement unfinished.

    Raises UsageError where the named one holds a run, or a measurement of something else.
    """
    if folder and (Path(folder) / "recipe.yaml").is_file():
        raise UsageError(
            f"{folder} is a run's folder; give a measurement of running servers one of its own with --run."
        )
    for number in itertools.count(1):
        root = (
            Path(folder) if folder else Path("runs") / f"bench-{re.sub(r'[^0-9A-Za-z.]+', '-', url)}-{number}"
        )
        path = root / "servers.json"
        same = path.is_file() and read_json(path) == wanted
        if (
            not root.exists()
            or not (path.is_file() or folder is None)
            or (same and (folder or not (root / "bench.json").is_file()))
        ):
            return RunDir(root)
        if folder:
            raise UsageError(
                f"{folder} holds a measurement of other servers or with other settings; choose another folder with --run."
            )
    raise AssertionError("unreachable")


def judge_file(path: Path, sets: tuple[str, ...]) -> dict[str, Any]:
    """The verdict on a bench.json, whoever measured it; written beside it."""
    from eyas.verdict import stage

    bench = read_json(path)
    if (
        not isinstance(bench, dict)
        or not {"cells", "engine", "concurrency", "dtype", "device"} <= bench.keys()
    ):
        raise UsageError(f"{path} is not a bench.json of eyas")
    body = stage.decide(bench, _served_recipe(None, sets).verdict, None)
    stage.show(body)
    write_json(path.with_name("verdict.json"), body)
    return body


def show_rows(word: str, sets: tuple[str, ...], folder: str | None, count: int) -> None:
    """Print rows of a run's conversations, finished or not. Raises UsageError where there are none."""
    from eyas.generate import show
    from eyas.stores import conversations

    resolved, rundir, _ = open_run(word, sets, folder)
    if not conversations.parts(rundir / "conversations"):
        raise UsageError(f"{rundir / 'conversations'} has no rows yet: eyas generate {word}")
    code = resolved.recipe.target.trust_remote_code
    show.show(rundir / "conversations", resolved.target.tokenizer(code), count)
