"""bench: drafter + target -> measurements, baseline against drafter, in one loop.

Reads drafter/best and the held-out conversations that the drafter never saw; writes bench/, bench.json.

    eyas bench RECIPE
"""

from typing import Any

from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.stores import conversations


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Measure every k against k = 0 in the recipe's engine; returns the manifest. Resumes after the last full round."""
    seen = set(
        rundir.manifest("train")["held_out_left_out"]
    )  # prompts that the drafter's parent was trained on
    held_out = [
        r for r in conversations.read(rundir / "conversations", "held_out") if r.prompt_id not in seen
    ]
    rows = conversations.spread(held_out, resolved.recipe.bench.limit, lambda r: r.domain)
    if resolved.recipe.engine.name == "hf":
        from eyas.bench import embedded

        return rundir.finish("bench", embedded.run(resolved, rundir, rows))
    from eyas.bench import served

    return rundir.finish("bench", served.run(resolved, rundir, rows))
