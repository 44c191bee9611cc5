"""check: drafter -> findings. Reads drafter/best and the target's facts; writes check.json.

eyas check RECIPE        eyas check DRAFTER_FOLDER --target TARGET_FOLDER [--engine vllm --engine-version 0.32.0] [--fix]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.causes import Finding, error, healthy, info
from eyas.check import engine_rules, mend, rules
from eyas.check.engine_rules import Named
from eyas.contract import FIELDS
from eyas.drafter import facts
from eyas.drafter.facts import Facts
from eyas.errors import ContractError
from eyas.progress import say, table
from eyas.target import Target

if TYPE_CHECKING:  # checking a folder needs neither recipes nor torch
    from eyas.recipe import Resolved
    from eyas.rundir import RunDir


def run(resolved: "Resolved", rundir: "RunDir") -> dict[str, Any]:
    """Check the run's best drafter against its target, and for the recipe's engine; returns the manifest."""
    args = tuple(resolved.recipe.engine.args)
    return rundir.finish(
        "check", look(rundir / "drafter" / "best", resolved.target, _engine(resolved), args=args)
    )


def _engine(resolved: "Resolved") -> Named | None:
    options = resolved.recipe.engine
    if options.name == "hf" or options.url:
        return None
    from eyas.engines import vllm

    found = vllm.find(options.python, options.command)
    return engine_rules.named(options.name, found.version)._replace(device=found.device)


def check(
    folder: Path, target: Target | None, engine: Named | None = None, args: Sequence[str] = ()
) -> tuple[list[Finding], Facts | None]:
    """Every finding of every rule, and what they looked at. A folder that cannot be read is one error. args: of the server."""
    try:
        seen = facts.gather(folder, target)
    except ContractError as e:
        return [error("read", str(e))], None
    found = [finding for rule in rules.RULES for finding in rule(seen)]
    if engine:
        found += [*engine_rules.findings(seen, engine), *engine_rules.launched(seen, engine, args)]
    return found, seen


def look_at_data(folder: Path, target: Target | None) -> dict[str, Any]:
    """Check a folder of conversations or states; prints the findings and returns them."""
    from eyas.check import data_rules

    found = list(
        (data_rules.of_states if data_rules.is_states(folder) else data_rules.of_conversations)(
            folder, target
        )
    )
    if target is None:
        found.append(info("target", "no target given (--target DIR): the data are checked alone"))
    show(found)
    good = healthy(found)
    if good:
        say(f"  {folder}: nothing stands in the way")
    return {
        "drafter": folder.name,
        "dialect": None,
        "healthy": good,
        "findings": [f.as_json() for f in found],
        "mended": [],
        "card": None,
    }


def show(findings: list[Finding]) -> None:
    """Print findings with their fixes."""
    for f in findings:
        say(f"  {f.severity}: [{f.rule}] {f.message}" + (f"\n      fix: {f.fix}" if f.fix else ""))


def look(
    folder: Path,
    target: Target | None,
    engine: Named | None = None,
    fix: bool = False,
    args: Sequence[str] = (),
) -> dict[str, Any]:
    """Check any drafter folder; prints the findings and returns them. fix: mend first what can be mended for certain."""
    findings, seen = check(folder, target, engine, args)
    done = mend.mend(seen) if fix and seen else []
    if done:
        for text in done:
            say(f"  mended: {text}")
        findings, seen = check(folder, target, engine, args)
    show(findings)
    good = healthy(findings)
    if seen is not None and engine is None:
        table(engine_rules.table(seen))
    if good:
        said = f" in {engine.name} {'.'.join(map(str, engine.version))}" if engine else ""
        say(f"  {folder}: nothing stands in the way{said} ({len(rules.RULES)} rules)")
    card = (
        {
            n: {"value": str(seen.card[n].value), "source": seen.card[n].source, "from": seen.card[n].where}
            for n in FIELDS
        }
        if seen
        else None
    )
    return {
        "drafter": folder.name,
        "dialect": seen.reading.dialect if seen else None,
        "healthy": good,
        "findings": [f.as_json() for f in findings],
        "mended": done,
        "card": card,
    }
