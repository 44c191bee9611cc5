"""A real vLLM (make engine-vllm) serves the real small target, with the drafter that ships and without: two starts of a minute."""

import json
import re
import shutil
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from eyas import outside, pipeline
from eyas.drafter import decode
from eyas.engines import vllm
from eyas.engines.hf import HFEngine
from eyas.errors import SurroundingsError
from eyas.recipe import SHIPPED_DRAFTERS
from eyas.servers import launch, records, serve
from eyas.stores import conversations

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "smollm2-135m"
QUESTIONS = (
    "How do I bake bread?",
    "What is 12 plus 30? Explain.",
    "Tell me about the moon.",
    "Write a short poem.",
)
TOKENS = 40


def call(url, body=None):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=180) as reply:
        return reply.read().decode()


def counter(url, name):
    found = re.findall(rf"^vllm:{name}_total\{{[^}}]*\}} ([0-9.e+]+)$", call(f"{url}/metrics"), re.M)
    return sum(map(float, found))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    assert TARGET.is_dir(), "eyas fetch smollm2-135m first (make test-engines does)"
    folder = tmp_path_factory.mktemp("served")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "name": "served",
                "target": {"model": str(TARGET), "dtype": "float32"},
                "engine": {
                    "name": "vllm",
                    "args": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
                },
            }
        )
    )
    shutil.copytree(SHIPPED_DRAFTERS / "smollm2-135m", folder / "drafter" / "best")
    resolved, rundir, _ = pipeline.open_run(str(folder), (), str(folder))
    return resolved, rundir


@pytest.fixture(scope="module")
def served(run):
    record = serve.serve(*run, baseline=False, port=None, ready_s=600)
    assert (
        len(records.members(record)) >= 3
    )  # the HTTP server, the engine, a worker: two of them under their own titles
    yield record
    assert records.stop(record) >= 1
    assert records.members(record) == []


def test_it_answers_as_the_embedded_engine_does_and_accepts_drafts(run, served):
    """Greedy, float32: the first tokens of each answer are equal (later ones may part at a near tie), and tau is that of the
    model card, roughly: some 2.3 on other prompts."""
    resolved, _ = run
    engine = HFEngine(resolved.target, "float32", "cpu", resolved.aux_layers)
    tokenizer = resolved.target.tokenizer()
    steps, accepted = (
        counter(served.url, "spec_decode_num_drafts"),
        counter(served.url, "spec_decode_num_accepted_tokens"),
    )
    equal = 0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {
            "model": served.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": TOKENS,
            "return_token_ids": True,
        }
        choice = json.loads(call(f"{served.url}/v1/chat/completions", body))
        ids = choice["choices"][0]["token_ids"]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert choice["prompt_token_ids"] == prompt
        mine = decode.decode(engine, None, None, prompt, 0, TOKENS).ids
        assert ids[:4] == mine[:4]
        equal += ids == mine
    assert equal >= len(QUESTIONS) // 2
    steps = counter(served.url, "spec_decode_num_drafts") - steps
    accepted = counter(served.url, "spec_decode_num_accepted_tokens") - accepted
    print(
        f"{served.engine}: {equal} of {len(QUESTIONS)} answers equal; tau {1 + accepted / steps:.3f} over {steps:.0f} steps"
    )
    assert 1.6 < 1 + accepted / steps < 4


@pytest.fixture(scope="module")
def plain(run):
    record = serve.serve(*run, baseline=True, port=None, ready_s=600)
    yield record
    assert records.stop(record) >= 1 and records.members(record) == []


def test_generate_asks_a_running_server_and_keeps_its_ids(run, plain, tmp_path):
    """Sampled and greedy answers, second turns with their history; greedy ids are the embedded engine's."""
    lines = [{"turns": [q, "Say it in one sentence."], "id": f"q{i}"} for i, q in enumerate(QUESTIONS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sets = (
        f"engine.url={plain.url}", f"prompts.sources=[{{path: {tmp_path}/prompts.jsonl}}]", "prompts.held_out=0.8",  # by their hashes: the first two
        "generate.max_tokens=24",
    )  # fmt: skip
    made = pipeline.run(str(run[1].root), sets, str(tmp_path / "run"), first="generate", last="generate")[
        "generate"
    ]
    assert made["read_otherwise"] == 0 and sum(made["rows"].values()) == 2 * len(QUESTIONS)
    engine = HFEngine(run[0].target, "float32", "cpu", run[0].aux_layers)
    held_out = list(conversations.read(tmp_path / "run" / "conversations", "held_out"))
    for row in held_out:
        assert row.completion_ids[:4] == decode.decode(engine, None, None, row.prompt_ids, 0, 24).ids[:4]


def test_the_two_are_measured_under_load(served, plain, tmp_path):
    sets = ("bench.limit=4", "bench.max_tokens=32", "bench.rounds=1", "bench.concurrency=[1, 4]")
    body = outside.bench_url(served.url, plain.url, None, sets, str(tmp_path / "b"))
    assert [(c["concurrency"], c["k"]) for c in body["cells"]] == [(1, 3), (4, 3)]
    for cell in body["cells"]:
        assert cell["tau_from"] == "counters"  # speeds are not looked at: others may use the machine
        assert cell["cached_share"] == 0 and cell["foreign_share"] == {"baseline": 0, "drafter": 0}
        assert 1.6 < cell["tau"]["value"] < 4 and cell["outputs"]["fault"] == 0
        kinds = {name: found["kind"] for name, found in cell["probes"].items()}
        assert kinds == {"schema": "right", "tool": "right", "long": "right"}
    requests = pq.read_table(tmp_path / "b" / "bench" / "requests.parquet").to_pylist()
    drafted = [r for r in requests if r["k"] == 3 and r["concurrency"] == 1]
    stream = 1 + sum(sum(r["accepted_at"]) for r in drafted) / sum(r["steps"] for r in drafted)
    assert stream == pytest.approx(body["cells"][0]["tau"]["value"], rel=0.08)


def test_its_port_is_refused_to_another_and_it_is_not_taken_for_one(run, served):
    resolved, rundir = run
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(SurroundingsError, match=f"port {port} .* is taken by process"):
        serve.serve(resolved, rundir, baseline=True, port=port, ready_s=5)
    assert [r.name for r in records.every() if r.nonce == served.nonce] == ["served"]


def test_an_argument_that_it_does_not_know_is_named(run):
    resolved, rundir, _ = pipeline.open_run(
        str(run[1].root), ("name=unknown", "engine.args=[--no-such-flag]"), str(run[1].root)
    )
    made, _ = serve.plan(resolved, rundir, True, None)
    with pytest.raises(SurroundingsError, match="does not know one of the arguments"):
        launch.start(made, ready_s=300)
    assert all(r.name != made.name for r in records.every())


def test_its_version_is_one_that_was_tried():
    assert vllm.untested(vllm.find(None).version) is None
