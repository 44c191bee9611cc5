"""2,000 prompts through vLLM with a kill -9 in the middle, beside vLLM's own benchmark of the same server, prompts and concurrency.

    python benchmarks/generate_served.py TARGET [--python ENGINE_PYTHON] [--prompts 2000] [--max-tokens 32] [--concurrency 16]

The server is started once. `vllm bench serve` asks it before and after (its environment needs pandas: ENGINE_PYTHON -m pip install pandas);
between them eyas generates, is killed with -9 at two fifths, and goes on. Answers a second and tokens a second of both; rows that were lost
or stand twice. Writes docs/results/generate-served.json.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import yaml
from common import write

from eyas import pipeline
from eyas.generate.sources import BUILTIN
from eyas.rundir import read_json
from eyas.servers import serve
from eyas.stores import conversations

SAMPLE = 400  # prompts of one round of the engine's benchmark
BENCH = """
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # `vllm bench serve`, also of builds whose distribution is not called vllm


def prompts(count: int) -> list[str]:
    """The shipped prompts, then pairs of them as one request with two parts."""
    own = [json.loads(line)["turns"][0] for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    apart = ((own[i], own[(i + gap) % len(own)]) for gap in itertools.count(1) for i in range(len(own)))
    return [*own, *(f"{a}\n\nAnd when that is done: {b}" for a, b in itertools.islice(apart, count))][:count]


def engine_rate(python: str, url: str, target: Path, file: Path, a: Any) -> dict[str, float]:
    """vllm bench serve over the chat endpoint: output tokens and requests a second."""
    folder = Path(tempfile.mkdtemp())
    command = [
        python, "-c", BENCH, "--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", a.model,
        "--tokenizer", str(target), "--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", str(a.max_tokens),
        "--num-prompts", str(SAMPLE), "--max-concurrency", str(a.concurrency), "--save-result", "--result-dir", str(folder), "--result-filename",
        "out.json", "--temperature", "0.8", "--skip-chat-template", "--disable-shuffle",
    ]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    body = read_json(folder / "out.json")
    return {
        "tokens_per_s": body["output_throughput"],
        "answers_per_s": body["request_throughput"],
        "completed": body["completed"],
    }


def rows(folder: Path) -> list[Any]:
    return [r for path in conversations.parts(folder) for r in conversations.read_part(path)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--python", default=None)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    a = parser.parse_args()
    target = Path(a.target).resolve()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        texts = prompts(a.prompts)
        (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts), encoding="utf-8")  # fmt: skip
        step = max(1, len(texts) // SAMPLE)
        (root / "sample.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts[::step][:SAMPLE]), encoding="utf-8")  # fmt: skip
        recipe: dict[str, Any] = {
            "name": "served", "target": {"model": str(target)}, "engine": {"name": "vllm", "python": a.python},
            "prompts": {"sources": [{"path": str(root / "prompts.jsonl")}]},
            "generate": {"max_tokens": a.max_tokens, "concurrency": a.concurrency}, "bench": {"concurrency": [a.concurrency]},
        }  # fmt: skip
        (root / "r.yaml").write_text(yaml.safe_dump(recipe))
        resolved, rundir, _ = pipeline.open_run(str(root / "r.yaml"), (), str(root / "run"))
        run = root / "run"
        with serve.running(resolved, rundir, "benchmark") as server:
            a.model = server.model
            engine = serve.vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command)
            before = engine_rate(engine.python, server.url, target, root / "sample.jsonl", a)
            print(f"vllm bench serve: {before}", flush=True)
            recipe["engine"]["url"] = server.url
            (root / "r.yaml").write_text(yaml.safe_dump(recipe))
            command = [sys.executable, "-m", "eyas", "run", str(root / "r.yaml"), "--run", str(run), "--until", "generate"]  # fmt: skip
            process = subprocess.Popen(command)
            while process.poll() is None and len(rows(run / "conversations")) < 0.4 * a.prompts:
                time.sleep(1)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kept = len(rows(run / "conversations"))
            print(f"killed with {kept} rows on disk", flush=True)
            subprocess.run(command, check=True)
            after = engine_rate(engine.python, server.url, target, root / "sample.jsonl", a)
            print(f"vllm bench serve: {after}", flush=True)
        made = read_json(run / "conversations" / "manifest.json")
        found = rows(run / "conversations")
        count = Counter(r.row_id for r in found)
        own = made["rates"]["completion_tokens_per_s"]
        theirs = (before["tokens_per_s"] + after["tokens_per_s"]) / 2
        body = {
            "tokens_per_s": own, "engine_tokens_per_s": theirs, "ratio": own / theirs, "engine_rounds": [before, after], "rows": len(found),
            "prompts": len(texts), "left_out_before_asking": made["prompts"]["left_out"], "lost": len(texts) - sum(made["prompts"]["left_out"].values()) - len(count),
            "doubled": sum(n - 1 for n in count.values()), "kept_at_the_kill": kept, "truth": made["truth"], "on_policy": made["on_policy"],
            "settings": {
                "engine": f"vLLM {engine.version} ({engine.device})", "concurrency": a.concurrency, "max_tokens": a.max_tokens, "sample": SAMPLE, "dtype": resolved.dtype,
            },
        }  # fmt: skip
    print(f"{'tokens/s':>12}{'engine':>10}{'ratio':>8}{'rows':>8}{'lost':>6}{'doubled':>9}")
    print(
        f"{own:>12,.1f}{theirs:>10,.1f}{body['ratio']:>8.3f}{len(found):>8,}{body['lost']:>6}{body['doubled']:>9}"
    )
    write("generate-served", body)


if __name__ == "__main__":
    main()
