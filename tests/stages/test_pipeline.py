"""The whole life on a tiny target, and what happens when it is broken, changed or killed."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from eyas import pipeline
from eyas.cli import eyas
from eyas.errors import ContractError, StaleError, SurroundingsError, UsageError
from eyas.rundir import RunDir, read_json
from eyas.stores import conversations


def run(recipe_file: Path, folder: Path, *sets: str, first=None, last=None):
    return pipeline.run(str(recipe_file), sets, str(folder), first, last)


def test_every_stage_leaves_what_the_run_folder_promises(finished):
    _, folder, made = finished
    assert list(made) == list(pipeline.NAMES)
    for name in [
        "recipe.yaml",
        "resolved.json",
        "run.json",
        "plan.json",
        "conversations/manifest.json",
        "conversations/quarantine.jsonl",
        "states/manifest.json",
        "train/steps.jsonl",
        "train/evals.jsonl",
        "train/state/state.safetensors",
        "drafter/epoch-1/config.json",
        "drafter/best/model.safetensors",
        "drafter/best/contract.json",
        "drafter/best/metrics.json",
        "check.json",
        "bench/requests.parquet",
        "bench.json",
        "verdict.json",
        "report.html",
    ]:
        assert (folder / name).is_file(), name
    assert not list(folder.rglob("*.tmp")) and not list(folder.glob("**/.best.*"))


def test_hand_overs_carry_their_numbers(finished):
    _, _, made = finished
    checks = made["extract"]["checks"]
    assert checks["head_agreement"] == checks["disk_agreement"] == 1.0 and checks["disk_near_ties"] == 0
    assert made["extract"]["checks"]["greedy_agreement"] > 0.98
    assert made["check"]["healthy"] and {f["severity"] for f in made["check"]["findings"]} <= {"info"}
    for cell in made["bench"]["cells"]:
        assert cell["outputs"] == {"equal": 3, "near_tie": 0, "fault": 0}
        assert cell["tau_replayed"] == pytest.approx(cell["tau"]["value"], rel=0.03)


def test_held_out_prompts_are_answered_greedily_and_no_prompt_is_on_both_sides(finished):
    _, folder, _ = finished
    rows = list(conversations.read(folder / "conversations"))
    sides = {split: {r.prompt_id for r in rows if r.split == split} for split in ("train", "held_out")}
    assert sides["train"] and sides["held_out"] and not sides["train"] & sides["held_out"]
    assert {r.temperature for r in rows if r.split == "held_out"} == {0.0}
    second = [r for r in rows if r.turn == 1]
    assert second and all(r.prompt_ids.count(1) == 2 for r in second), (
        "a second turn holds the first user turn"
    )


def test_a_second_run_does_nothing_again(finished, capsys):
    recipe, folder, made = finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.parent.name != "run"}
    again = run(recipe, folder)
    assert {n: m["fingerprint"] for n, m in again.items() if n != "report"} == {
        n: m["fingerprint"] for n, m in made.items() if n != "report"
    }
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    assert capsys.readouterr().err.count("done already") == 7


def test_the_report_is_self_contained_and_verdict_first(finished):
    _, folder, made = finished
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.index(made["verdict"]["sentence"].split(":")[0]) < html.index("<h2>")
    for outside in ("http://", "https://", "<script", "<link", "@import"):
        assert outside not in html.replace("http://www.w3.org", ""), outside
    assert html.count("url(") == html.count("url(#")
    assert html.count("<svg") == 4


def test_a_changed_costly_stage_is_refused_by_name_with_both_values(recipe_file, tmp_path):
    folder = tmp_path / "run"
    run(recipe_file, folder, last="generate")
    with pytest.raises(
        StaleError, match=r'"generate".*generate\.max_tokens was 16, is now 12.*--from generate'
    ):
        run(recipe_file, folder, "generate.max_tokens=12", last="generate")
    again = run(recipe_file, folder, "generate.max_tokens=12", first="generate", last="generate")
    assert again["generate"]["tokens"]["completion_train"] > 0
    assert max(len(r.completion_ids) for r in conversations.read(folder / "conversations")) <= 12


def test_a_batch_is_smaller_where_its_cache_would_not_fit(recipe_file, finished, tmp_path, monkeypatch):
    """256 bytes of keys and values a token: 128 tokens fit into 32 KiB, which is some three rows, not six."""
    monkeypatch.setattr("eyas.generate.answering.CACHE_BYTES", {"cpu": 32768})
    folder = tmp_path / "run"
    pipeline.run(str(recipe_file), (), str(folder), None, "generate")
    parts = conversations.parts(folder / "conversations")
    sizes = [len(conversations.read_part(p)) for p in parts]
    assert max(sizes) < 6 and len(parts) > len(conversations.parts(finished[1] / "conversations"))
    key = {r.row_id: r.completion_ids for r in conversations.read(finished[1] / "conversations")}
    assert {r.row_id: r.completion_ids for r in conversations.read(folder / "conversations")} == key


def test_a_run_of_another_version_is_refused_and_can_begin_anew(recipe_file, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[1], folder)
    for name in ("plan.json", "train/manifest.json"):
        old = read_json(folder / name) | {"format": 1}
        (folder / name).write_text(json.dumps(old))
    with pytest.raises(
        UsageError, match=r"another version of eyas \(format 1, this one has 5\).*--from plan"
    ):
        pipeline.run(str(recipe_file), (), str(folder))
    pipeline.run(str(recipe_file), (), str(folder), "plan", "generate")
    assert RunDir(folder).manifest("plan")["format"] == 5


def test_one_more_prompt_keeps_the_answers_and_makes_what_follows_stale(
    recipe_file, tmp_path, prompt_file, capsys
):
    mine = tmp_path / "mine.jsonl"
    mine.write_text(prompt_file.read_text())
    source = f"prompts.sources=[{{path: {mine}}}]"
    run(recipe_file, tmp_path / "run", source, last="extract")
    before = conversations.parts(tmp_path / "run" / "conversations")
    kept = {p.name: p.read_bytes() for p in before}
    with mine.open("a") as f:
        f.write('\n{"prompt": "one more"}')
    made = run(recipe_file, tmp_path / "run", source, last="generate")
    assert sum(made["generate"]["rows"].values()) == 28
    after = conversations.parts(tmp_path / "run" / "conversations")
    assert len(after) == len(before) + 1 and all(p.read_bytes() == kept[p.name] for p in before)
    assert "goes on with what is there and still wanted, since prompts.sources was" in capsys.readouterr().err
    with pytest.raises(StaleError, match=r'"extract".*generate was'):
        run(recipe_file, tmp_path / "run", source, last="extract")


def test_a_run_in_use_is_refused_with_the_process(recipe_file, tmp_path):
    with RunDir(tmp_path / "run").lock(), pytest.raises(SurroundingsError, match=r"in use by process \d+"):
        run(recipe_file, tmp_path / "run", last="plan")


def test_a_stage_alone_needs_the_one_before(recipe_file, tmp_path):
    with pytest.raises(UsageError, match='"generate" has not finished'):
        pipeline.run_one("extract", str(recipe_file), (), str(tmp_path / "run"))


def outcome(folder: Path):
    """All that must be equal between a killed and resumed run and an uninterrupted one."""
    rows = [(r.row_id, r.completion_ids) for r in conversations.read(folder / "conversations")]
    states = [s["sha256"] for s in read_json(folder / "states" / "manifest.json")["content"]]
    weights = [(p.parent.name, p.read_bytes()) for p in sorted(folder.glob("drafter/*/model.safetensors"))]
    steps = [json.loads(line)["loss"] for line in (folder / "train" / "steps.jsonl").read_text().splitlines()]
    return rows, states, weights, steps


def test_a_run_killed_again_and_again_equals_an_uninterrupted_one(
    recipe_file, finished, tmp_path, monkeypatch
):
    """kill -9 in generate, extract and train: row for row, byte for byte, step for step."""
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "eyas",
        "run",
        str(recipe_file),
        "--run",
        str(folder),
        "--until",
        "train",
    ]
    marks = [
        "conversations/part-00001.parquet",
        "states/shard-00000.safetensors",
        "drafter/epoch-1/metrics.json",
    ]
    for mark in marks:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not (folder / mark).is_file() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    assert outcome(folder) == outcome(finished[1])


def test_a_swapped_shard_is_refused(recipe_file, tmp_path):
    folder = tmp_path / "run"
    run(recipe_file, folder, last="extract")
    shards = sorted((folder / "states").glob("shard-*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(ContractError, match=r"shard-00000.*checksum"):
        run(recipe_file, folder, last="train")


def test_states_of_another_final_norm_are_refused(recipe_file, tmp_path, monkeypatch):
    """The check reads norm and head from disk: a wrong norm is found before anything is trained."""
    from eyas.target import Target

    right = Target.final_norm_D
    monkeypatch.setattr(Target, "final_norm_D", lambda self: right(self).roll(1) * 3)
    with pytest.raises(ContractError, match="argmax at only"):
        run(recipe_file, tmp_path / "run", last="extract")


def test_a_disk_that_cannot_hold_the_run_is_refused_before_anything_is_made(
    recipe_file, tmp_path, monkeypatch
):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**6, 10**6, 10**4))
    with pytest.raises(SurroundingsError, match=r"the run needs .* and 10 kB are free"):
        run(recipe_file, tmp_path / "run", last="plan")


def test_exit_codes_of_the_command_line(finished, tmp_path, recipe_file):
    _, folder, made = finished
    invoke = [sys.executable, "-m", "eyas"]

    def code(*words):
        done = subprocess.run([*invoke, *words], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert code("run", str(folder))[0] == 0
    assert code("verdict", str(folder))[0] == (0 if made["verdict"]["ship"] else 1)
    assert code("check", str(folder / "drafter" / "best"))[0] == 0
    returned, said = code("run", "no-such-recipe")
    assert returned == 2 and "no recipe" in said and "Traceback" not in said
    returned, said = code(
        "run", str(recipe_file), "--set", "target.model=/no/where", "--run", str(tmp_path / "r")
    )
    assert returned == 2 and "/no/where is not a folder" in said and "Traceback" not in said
    assert code("run", str(recipe_file), "--from", "nowhere")[0] == 2


def test_json_of_a_stage_is_its_manifest(finished):
    _, folder, made = finished
    result = CliRunner().invoke(eyas, ["check", str(folder), "--json"])
    assert json.loads(result.stdout)["fingerprint"] == made["check"]["fingerprint"]
