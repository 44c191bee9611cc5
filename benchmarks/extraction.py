"""Keeping states in vLLM against not keeping them: a pass over stored ids, and generation, disk included.

    python benchmarks/extraction.py TARGET [--rounds 5] [--prefill 24x512] [--generate 16x64x64] [--arg=--max-model-len --arg=2048]

Two servers side by side, the same but for the plugin, take the same work in turn (vLLM's own default mode: compiled; random ids, so
nothing is cached). The keeping side counts until the last state is on the disk. Writes docs/results/extraction.json.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import yaml
from common import rounds, table, write

from eyas import pipeline
from eyas.servers import client, reading, serve
from eyas.servers.client import COMPLETIONS, Client
from eyas.stores.steps import Steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--python", help="a Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", default="24x512", help="rows x tokens")
    parser.add_argument("--generate", default="16x64x64", help="rows x prompt tokens x new tokens")
    parser.add_argument("--arg", action="append", default=[], help="of the server's command line")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write("extraction", measure(a, Path(folder)))


def measure(a: argparse.Namespace, root: Path) -> dict:
    recipe = root / "recipe.yaml"
    own = [] if torch.cuda.is_available() else ["--no-enforce-eager"]
    engine = {"name": "vllm", "args": [*own, *a.arg]} | ({"python": a.python} if a.python else {})
    recipe.write_text(
        yaml.safe_dump({"name": "extraction", "target": {"model": str(a.target)}, "engine": engine})
    )
    resolved, rundir, _ = pipeline.open_run(str(recipe), (), str(root / "run"))
    rundir.root.mkdir(parents=True)
    keep = root / "steps"
    rng = np.random.default_rng(0)
    count, length = map(int, a.prefill.split("x"))
    rows, prompt, new = map(int, a.generate.split("x"))
    names = iter(range(10**9))

    def fresh(n: int, tokens: int) -> list[tuple[str, list[int]]]:
        return [
            (str(next(names)), rng.integers(10, resolved.target.vocab, tokens).tolist()) for _ in range(n)
        ]

    def passed(server: serve.Running, steps: Steps | None) -> int:
        work = fresh(count, length)
        reading.read(server.url, server.model, work, concurrency=count)
        settle(steps, {name: length for name, _ in work})
        return count * length

    def generated(server: serve.Running, steps: Steps | None) -> int:
        work = fresh(rows, prompt)
        bodies = [
            {
                "model": server.model, "prompt": ids, "max_tokens": new, "temperature": 0.0, "ignore_eos": True,
                **(reading.tag(name) if steps else {}),
            }
            for name, ids in work
        ]  # fmt: skip

        async def ask() -> None:
            async with Client(server.url) as asking:
                await client.gather(asking.whole, COMPLETIONS, bodies, rows)

        client.run(ask())
        settle(steps, {name: prompt + new - 1 for name, _ in work})
        return rows * new

    with (
        serve.running(resolved, rundir, "plain") as plain,
        serve.running(resolved, rundir, "keeping", keep=keep) as keeping,
    ):
        steps = Steps.opened(keep)
        about = {
            "engine": plain.engine,
            "target": a.target.name,
            "dtype": resolved.dtype,
            "device": resolved.device,
        }
        about |= {
            "prefill": a.prefill,
            "generate": a.generate,
            "args": a.arg,
            "bytes_per_token": resolved.token_bytes,
        }
        out = {}
        for name, work in (("pass", passed), ("one pass", generated)):
            rates = rounds(
                {"plain": lambda w=work: w(plain, None), "keeping states": lambda w=work: w(keeping, steps)},
                a.rounds,
            )
            print(f"\n{name}")
            out[name] = table("plain", rates)
    return {"rows": out, "settings": about}


def settle(steps: Steps | None, lengths: dict[str, int]) -> None:
    """Until every state is on the disk; what is kept is then thrown away."""
    if steps:
        steps.wait(lengths)
        steps.forget(list(lengths))


if __name__ == "__main__":
    main()
