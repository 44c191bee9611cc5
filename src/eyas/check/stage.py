"""check: drafter -> findings. Reads drafter/best and the target's facts; writes check.json.

eyas check RECIPE        eyas check DRAFTER_FOLDER --target TARGET_FOLDER
"""

from pathlib import Path
from typing import Any

from eyas.causes import healthy
from eyas.check import rules
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.target import Target


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Check the run's best drafter against its target; returns the manifest."""
    return rundir.finish("check", look(rundir / "drafter" / "best", resolved.target))


def look(folder: Path, target: Target | None) -> dict[str, Any]:
    """Check any drafter folder; prints the findings and returns them."""
    findings = rules.check(folder, target)
    for finding in findings:
        say(f"  {finding.severity}: [{finding.rule}] {finding.message}")
    good = healthy(findings)
    if good:
        say(f"  {folder}: nothing stands in the way ({len(rules.RULES)} rules)")
    return {"drafter": folder.name, "healthy": good, "findings": [f.as_json() for f in findings]}
