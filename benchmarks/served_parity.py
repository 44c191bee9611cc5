"""Does a running vLLM accept what the replay of its own answers says, step by step? With a drafter as it was trained, and served broken.

    python benchmarks/served_parity.py RUN [--k 3] [--only NAME] [--set PATH=VALUE]

RUN is the folder of a finished run with vLLM. Each variant is served, and its own answers are replayed with the whole drafter: eyas check
--probe --url. Writes docs/results/served-parity.json.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import write
from silent_faults import VARIANTS, make

from eyas import outside, pipeline
from eyas.check import parity
from eyas.check.probing import Place
from eyas.engines import vllm
from eyas.rundir import RunDir
from eyas.servers import serve

SERVED = (
    "as it was trained",
    "aux layers one too early",
    "norm_output turned on",
    "rope_theta left out",
    "d2t left out",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--only", action="append", help="of the variants, those whose name holds this")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    a = parser.parse_args()
    resolved, rundir, _ = pipeline.open_run(a.run, a.sets, None)
    best = rundir / "drafter" / "best"
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in (v for v in VARIANTS if v.name in SERVED):
            if a.only and not any(part in variant.name for part in a.only):
                continue
            place = RunDir(Path(folder) / str(len(out)))
            make(variant, best, place, resolved)
            with serve.running(resolved, place, "parity", a.k) as server:
                found, body = parity.look(
                    best, resolved.target, server.url, outside.held_out_prompts(), Place(resolved.dtype)
                )
            for f in found:
                print(f"{variant.name}: {f.severity}: {f.message}; next: {f.fix or 'nothing'}", flush=True)
            out.append(
                {
                    "variant": variant.name,
                    "findings": [f.as_json() for f in found],
                    **{k: v for k, v in body.items() if k != "url"},
                }
            )
    version = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command).version
    write(
        "served-parity",
        {
            "rows": out,
            "settings": {
                "engine": f"vLLM {version}",
                "device": resolved.device,
                "dtype": resolved.dtype,
                "k": a.k,
            },
        },
    )


if __name__ == "__main__":
    main()
