"""How many answers of 1,000 token ids a second eyas takes from a server and stores, on one core, and what memory that holds.

    python benchmarks/client.py TARGET [--requests 50000] [--ids 1000] [--concurrency 64]

TARGET is a model folder (its tokenizer and template render the prompts). A local server on another core answers every request with the same
bytes, so that what is measured is eyas's own work: prompts rendered, requests sent, answers read, checked, and written to Parquet. Writes
docs/results/client.json.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import yaml
from common import write

from eyas import pipeline
from eyas import target as targets
from eyas.stores import conversations


def serve(folder: str, count: int, core: int, address) -> None:
    """One answer for all: ids of words, their text, and the ids of a prompt."""
    from tests.servers.stub import Stub

    os.sched_setaffinity(0, {core})
    tokenizer = targets.load(Path(folder)).tokenizer()
    ids, word = [], 0
    while len(ids) < count:
        word += 1
        ids += tokenizer(f" word {word} and", add_special_tokens=False)["input_ids"]
    ids = ids[:count]
    text = tokenizer.decode(ids)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "say 0"}], add_generation_prompt=True, return_dict=True)["input_ids"]  # fmt: skip
    body = {
        "model": "stub", "prompt_token_ids": list(prompt),
        "choices": [{"message": {"role": "assistant", "content": text}, "token_ids": ids, "finish_reason": "length"}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }  # fmt: skip
    with Stub(tokenizer, prepared=json.dumps(body).encode(), longest=8192) as stub:
        address.put(stub.url)
        threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--ids", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    a = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    address = multiprocessing.get_context("spawn").Queue()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(a.target, a.ids, cores[-1], address), daemon=True
    )
    server.start()
    url = address.get()
    os.sched_setaffinity(0, {cores[0]})
    seen: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with (root / "prompts.jsonl").open("w") as f:
            for i in range(a.requests):
                f.write(json.dumps({"prompt": f"say {i}"}) + "\n")
        recipe = {
            "name": "client", "target": {"model": str(Path(a.target).resolve()), "dtype": "float32"},
            "engine": {"name": "vllm", "url": url}, "prompts": {"sources": [{"path": str(root / "prompts.jsonl")}]},
            "generate": {"max_tokens": a.ids, "concurrency": a.concurrency},
        }  # fmt: skip
        (root / "client.yaml").write_text(yaml.safe_dump(recipe))
        over = threading.Event()

        def watch() -> None:
            process = psutil.Process()
            while not over.wait(1.0):
                seen.append(
                    (len(conversations.parts(root / "run" / "conversations")), process.memory_info().rss)
                )

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        began, cpu = time.perf_counter(), time.process_time()
        resolved, rundir, values = pipeline.open_run(str(root / "client.yaml"), (), str(root / "run"))
        pipeline.prepare(resolved, rundir, values)
        made = pipeline.work(pipeline.BY_NAME["generate"], resolved, rundir)
        seconds, busy = time.perf_counter() - began, time.process_time() - cpu
        over.set()
        watcher.join()
    rate = made["rates"]["completion_tokens_per_s"] / a.ids
    parts = seen[-1][0]
    early = max(rss for n, rss in seen if 0.1 * parts <= n <= 0.2 * parts)
    late = max(rss for n, rss in seen if n >= 0.9 * parts)
    print(f"{'answers/s':>12}{'whole run s':>14}{'cpu s':>10}{'MiB at 20 %':>14}{'MiB at 100 %':>14}")
    print(f"{rate:>12,.0f}{seconds:>14.1f}{busy:>10.1f}{early / 2**20:>14,.0f}{late / 2**20:>14,.0f}")
    write(
        "client",
        {
            "answers_per_s": rate, "rows": made["rows"], "seconds": seconds, "cpu_seconds": busy, "rss_early_bytes": early, "rss_late_bytes": late,
            "settings": {"requests": a.requests, "ids": a.ids, "concurrency": a.concurrency},
        },
    )  # fmt: skip
    server.terminate()


if __name__ == "__main__":
    main()
