"""Launch, wait, watch, stop: with a vLLM that answers, dies, hangs, lies, or leaves workers behind."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import jsonschema
import psutil
import pytest
from click.testing import CliRunner

from eyas import pipeline
from eyas.cli import eyas
from eyas.errors import SurroundingsError, UsageError
from eyas.servers import host, launch, records, serve
from tests.kimi import standin
from tests.servers.conftest import taken_port, wait_for

VLLM = ("engine.name=vllm",)


def processes_with(nonce):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(records.MARK) == nonce:
                found.append(process)
        except psutil.Error:
            continue
    return found


def fits(verb, value):
    schema = json.loads((Path(__file__).parents[2] / "docs" / "json-schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{verb}", "$defs": schema["$defs"]}).validate(value)


def opened(finished, python, *sets):
    resolved, rundir, _ = pipeline.open_run(
        str(finished[1]), (*VLLM, f"engine.python={python}", *sets), str(finished[1])
    )
    return resolved, rundir


def test_a_server_is_started_listed_and_stopped_and_nothing_else(finished, fake_vllm, decoy, monkeypatch):
    monkeypatch.setenv("FAKE", "stubborn")
    record = serve.serve(*opened(finished, fake_vllm), baseline=False, port=None, ready_s=60)
    assert record.owner is None and record.model == "tiny"
    shown = CliRunner().invoke(eyas, ["ps", "--json"])
    fits("ps", json.loads(shown.stdout))
    fits("serve", json.loads(json.dumps(asdict(record))))
    (row,) = json.loads(shown.stdout)
    assert row["name"] == "tiny" and row["processes"] == 2 and row["url"] == record.url
    assert records.stop(record, grace_s=0.5) == 2
    assert records.members(record) == [] and records.every() == []


def test_workers_that_overwrite_their_environment_are_stopped_too(finished, fake_vllm, decoy, monkeypatch):
    """As VLLM::Worker does with its title; another's process without an environment survives."""
    monkeypatch.setenv("FAKE", "titled")
    bare = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={}, start_new_session=True
    )
    record = serve.serve(*opened(finished, fake_vllm), baseline=False, port=None, ready_s=60)
    wait_for(lambda: len(records.members(record)) == 2)
    (marked,) = processes_with(record.nonce)
    marked.kill()  # the worker alone is left
    wait_for(lambda: len(records.members(record)) == 1)
    assert records.stop(record, grace_s=0.5) == 1
    assert records.members(record) == []
    assert bare.poll() is None
    bare.kill()
    bare.wait()


def test_a_second_server_of_the_same_name_is_refused(finished, fake_vllm):
    resolved, rundir = opened(finished, fake_vllm)
    serve.serve(resolved, rundir, baseline=True, port=None, ready_s=60)
    with pytest.raises(SurroundingsError, match="eyas stop tiny-baseline"):
        serve.serve(resolved, rundir, baseline=True, port=None, ready_s=60)
    assert len(records.every()) == 1
    done = CliRunner().invoke(eyas, ["stop", "tiny-baseline", "--json"])
    fits("stop", json.loads(done.stdout))
    assert json.loads(done.stdout) == {"name": "tiny-baseline", "processes": 1}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dies", "lower --gpu-memory-utilization"),
        ("mumbles", "something nobody has seen before"),
        ("silent", "did not get ready in 3 s"),
        ("stranger", "answered by another server .its models: another"),
    ],
)
def test_a_server_that_fails_is_named_and_leaves_nothing(finished, fake_vllm, decoy, monkeypatch, kind, said):
    monkeypatch.setenv("FAKE", kind)
    resolved, rundir = opened(finished, fake_vllm)
    made, _ = serve.plan(resolved, rundir, False, None)
    with pytest.raises(SurroundingsError, match=said):
        launch.start(made, ready_s=3)
    assert processes_with(made.nonce) == [] and records.every() == []
    assert made.log.is_file()


def test_a_taken_port_names_who_has_it(finished, fake_vllm):
    listening, port = taken_port()
    with listening, pytest.raises(SurroundingsError, match=rf"port {port} .* process {os.getpid()}"):
        serve.serve(*opened(finished, fake_vllm), baseline=False, port=port, ready_s=5)


def test_the_orphans_of_a_killed_eyas_are_stopped_at_the_next_start(finished, fake_vllm, decoy, monkeypatch):
    monkeypatch.setenv("FAKE", "silent")
    command = [sys.executable, "-m", "eyas", "serve", str(finished[1]), "--set", VLLM[0], "--set"]
    ours = subprocess.Popen([*command, f"engine.python={fake_vllm}"], stderr=subprocess.DEVNULL)
    wait_for(lambda: records.every() and records.members(records.every()[0]))
    (record,) = records.every()
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    assert records.members(record), "the server outlives a killed eyas"
    shown = CliRunner().invoke(eyas, ["ps"])
    assert "left by an eyas that was killed" in shown.output and "no server of eyas" in shown.output
    assert records.members(record) == [] and records.every() == []


def test_ctrl_c_while_waiting_stops_what_was_started(finished, fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE", "silent")
    command = [sys.executable, "-m", "eyas", "serve", str(finished[1]), "--set", VLLM[0], "--set"]
    ours = subprocess.Popen([*command, f"engine.python={fake_vllm}"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: records.every() and records.members(records.every()[0]))
    (record,) = records.every()
    ours.send_signal(signal.SIGINT)
    _, said = ours.communicate(timeout=60)
    assert ours.returncode == 130 and "interrupted" in said
    assert records.members(record) == [] and records.every() == []


def test_a_server_that_ended_by_itself_is_forgotten(finished, fake_vllm):
    record = serve.serve(*opened(finished, fake_vllm), baseline=False, port=None, ready_s=60)
    (process,) = records.members(record)
    process.kill()
    wait_for(lambda: not records.members(record))
    assert records.sweep() == [] and records.every() == []


def test_a_dry_run_prints_the_command_and_starts_nothing(finished, fake_vllm):
    sets = ["--set", VLLM[0], "--set", f"engine.python={fake_vllm}", "--set", "engine.args=[--seed, '1']"]
    done = CliRunner().invoke(
        eyas, ["serve", str(finished[1]), "--dry-run", "--json", "--port", "8123", *sets]
    )
    made = json.loads(done.stdout)
    fits("serve", made)
    words = made["command"]
    assert words[:3] == [fake_vllm, "-m", "vllm.entrypoints.openai.api_server"] and words[-2:] == [
        "--seed",
        "1",
    ]
    assert words[words.index("--port") + 1] == "8123" and words[words.index("--host") + 1] == "127.0.0.1"
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert (
        speculative["method"] == "eagle3" and Path(speculative["model"]) == finished[1] / "drafter" / "best"
    )
    assert (
        speculative["num_speculative_tokens"]
        == json.loads((finished[1] / "verdict.json").read_text())["best_k"]
    )
    assert records.every() == []


def test_what_cannot_be_served_says_why(finished, fake_vllm, recipe_file, tmp_path):
    resolved, rundir, _ = pipeline.open_run(str(finished[1]), (), str(finished[1]))
    with pytest.raises(UsageError, match="embedded engine has no server"):
        serve.plan(resolved, rundir, False, None)
    resolved, rundir, _ = pipeline.open_run(str(recipe_file), VLLM, str(tmp_path / "empty"))
    with pytest.raises(UsageError, match=r"train a drafter first.*--baseline"):
        serve.plan(resolved, rundir, False, None)
    with pytest.raises(UsageError, match='no server "nobody"'):
        records.named("nobody")


def test_a_gpu_that_others_hold_is_refused_with_what_would_fit():
    free = host.Gpu(0, 80000, 500, [])
    taken = host.Gpu(1, 80000, 60000, ["process 12: 59000 MiB"])
    host.refuse_taken_gpus([free], [])
    host.refuse_taken_gpus([free, taken], ["--gpu-memory-utilization=0.2"])
    with pytest.raises(
        SurroundingsError, match=r"GPU 1: 20,000 of 80,000 MiB.*asks for 90%.*process 12.*'0.24'"
    ):
        host.refuse_taken_gpus([free, taken], [])


@pytest.mark.parametrize("args", [["--gpu-memory-utilization"], ["--gpu-memory-utilization=much"]])
def test_a_share_that_is_no_number_is_refused(args):
    with pytest.raises(UsageError, match="--gpu-memory-utilization is .* must be a positive number"):
        host.refuse_taken_gpus([], args)


def test_a_program_that_is_not_there_is_named_and_leaves_no_record(finished, fake_vllm):
    resolved, rundir = opened(finished, fake_vllm, "engine.command=[/no/nice, -n]")
    made, _ = serve.plan(resolved, rundir, False, None)
    with pytest.raises(SurroundingsError, match="cannot start /no/nice"):
        launch.start(made, ready_s=3)
    assert records.every() == []


def test_too_little_memory_is_refused_with_its_parts():
    with pytest.raises(SurroundingsError, match=r"weights 1e\+03 TB, key/value cache 0 B"):
        host.refuse_small_memory(10**15, 0)
    host.refuse_small_memory(0, 0)


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(SurroundingsError, match=r"1 kB free.*needs 67.1 MB"):
        host.refuse_full_disks(tmp_path / "servers" / "x.log")


def test_the_recipe_of_kimi_serves_as_the_story_did(fake_vllm, tmp_path):
    model = standin(tmp_path / "kimi", "--layers", "8", "--experts", "4", "--hidden", "64")
    sets = [f"target.model={model}", f"engine.python={fake_vllm}"]
    done = CliRunner().invoke(
        eyas,
        ["serve", "kimi-k2.5", "--baseline", "--dry-run", "--json", "--run", str(tmp_path / "run")]
        + [word for s in sets for word in ("--set", s)],
    )
    assert done.exit_code == 0, done.output
    words = json.loads(done.stdout)["command"]
    assert "--trust-remote-code" in words
    for pair in (
        ("--tensor-parallel-size", "8"), ("--reasoning-parser", "kimi_k2"), ("--tool-call-parser", "kimi_k2"),
        ("--gpu-memory-utilization", "0.92"), ("--dtype", "bfloat16"),
    ):  # fmt: skip
        assert words[words.index(pair[0]) + 1] == pair[1]
    lengths = [b for a, b in zip(words, words[1:], strict=False) if a == "--max-model-len"]
    assert lengths[-1] == "32768"  # the recipe's own word comes last
