"""Conversations and states: each kind of fault, and the healthy folder that gives no finding."""

import dataclasses
import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from eyas import target as targets
from eyas.check import data_rules, stage
from eyas.cli import eyas
from eyas.stores import conversations, states
from tests.conftest import END


@pytest.fixture
def target(target_folder):
    return targets.load(target_folder)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run's conversations and states."""
    for name in ("conversations", "states"):
        shutil.copytree(finished[1] / name, tmp_path / "run" / name)
    return tmp_path / "run"


def found(folder, target):
    made = stage.look_at_data(folder, target)
    return [(f["severity"], f["rule"], f["message"]) for f in made["findings"] if f["severity"] != "info"]


def rewrite(folder, change):
    """The rows after change(list of rows) -> list of rows, in one part."""
    rows = change(list(conversations.read(folder)))
    for path in conversations.parts(folder):
        path.unlink()
    conversations.write_part(folder / "part-00000.parquet", rows)


def ended(rows):
    """Rows whose answers all end by themselves, so that only what a test breaks is found."""
    return [
        dataclasses.replace(r, completion_ids=[*r.completion_ids[:-1], END], finish_reason="stop")
        for r in rows
    ]


def test_healthy_conversations_and_states_give_no_finding(run, target):
    rewrite(run / "conversations", ended)
    assert found(run / "conversations", target) == []
    shutil.rmtree(run / "conversations")  # whose rows the states no longer are
    assert found(run / "states", target) == []


def one(rows, **changes):
    return [dataclasses.replace(rows[0], **changes), *rows[1:]]


ROWS = {
    "C48 nothing to learn": (lambda rows: one(rows, completion_ids=[]), "error", "data-masks", "no answer"),
    "C48 all is learned": (lambda rows: one(rows, prompt_ids=[]), "error", "data-masks", "no prompt"),
    "C50 an end that is no stop id": (lambda rows: one(rows, completion_ids=[7, 8]), "error", "data-ends", "none of the target's stop ids"),
    "most are cut": (lambda rows: [dataclasses.replace(r, finish_reason="length") for r in rows], "warning", "data-ends", "cut by max_tokens"),
    "a row id twice": (lambda rows: [*rows, rows[0]], "error", "data-doubles", "appear twice"),
    "the same answers": (lambda rows: [*rows, *(dataclasses.replace(r, row_id=f"x{i}") for i, r in enumerate(rows))], "warning", "data-doubles", "repeat"),
    "a prompt on both sides": (
        lambda rows: [*rows, dataclasses.replace(rows[0], row_id="x", split="train" if rows[0].split == "held_out" else "held_out", completion_ids=[9, END])],
        "error", "data-doubles", "held out",
    ),
    "C56 another writer": (lambda rows: one(rows, target="0" * 16), "error", "data-target", "were not written by"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_each_kind_of_fault_in_conversations_is_found(run, target, kind):
    change, severity, rule, said = ROWS[kind]
    rewrite(run / "conversations", lambda rows: change(ended(rows)))
    assert any((s, r) == (severity, rule) and said in m for s, r, m in found(run / "conversations", target))


def test_a_target_that_thinks_and_no_thought(run, target, tmp_path, monkeypatch):
    monkeypatch.setattr(targets.Target, "added_tokens", lambda self: {"</think>": 250})
    rewrite(run / "conversations", ended)
    assert [r for _, r, _ in found(run / "conversations", target)] == ["data-thoughts"]
    rewrite(run / "conversations", lambda rows: one(rows, completion_ids=[250, 5, END]))
    assert found(run / "conversations", target) == []


def test_unfinished_and_broken_files_are_found(run, target):
    (run / "conversations" / "manifest.json").unlink()
    (run / "states" / "manifest.json").unlink()
    assert ("error", "data-files") in [f[:2] for f in found(run / "conversations", target)]
    assert ("error", "data-files") in [f[:2] for f in found(run / "states", target)]
    rewrite(run / "conversations", lambda rows: [])
    assert any("holds no row" in m for _, _, m in found(run / "conversations", target))
    conversations.parts(run / "conversations")[0].write_bytes(b"PAR1")
    assert [f[:2] for f in found(run / "conversations", target)] == [("error", "data-files")]


def reshard(folder, change):
    """The first shard's rows after change(row), with the manifest's checksum corrected."""
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / manifest["content"][0]["file"]
    rows = [r.load() for r in states.rows_of(path)]
    made = [change(i, r) for i, r in enumerate(rows)]
    states.write_shard(path, [r for r in made if r is not None], {})
    manifest["content"][0]["sha256"] = states.hashed(path)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def infinite(i, r):
    aux = r.aux_TLD.clone()
    aux[0, 0, 0] = float("nan")
    return dataclasses.replace(r, kept_TLD=aux)


STATES = {
    "C58 not a number": (infinite, "states-finite", "aux holds NaN"),
    "C58 another row": (lambda i, r: dataclasses.replace(r, row_id="x") if i == 0 else r, "states-rows", "are not those of"),
    "C58 another row's ids": (lambda i, r: dataclasses.replace(r, ids_T=r.ids_T + (i == 0)), "states-rows", "are not those of"),
    "C11 a row without states": (lambda i, r: None if i == 0 else r, "states-rows", "have no states"),
    "C06 fewer layers": (lambda i, r: dataclasses.replace(r, kept_TLD=r.aux_TLD[:, :2].contiguous()), "states-layers", "the shards hold 2"),
    "C08 another layer": (lambda i, r: dataclasses.replace(r, last_SD=r.aux_TLD[:, 1].float().contiguous()), "states-agreement", "another layer"),
    "C11 shifted by one": (lambda i, r: dataclasses.replace(r, last_SD=r.last_SD.roll(1, 0)), "states-agreement", "another layer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STATES)
def test_each_kind_of_fault_in_states_is_found(run, target, kind):
    change, rule, said = STATES[kind]
    reshard(run / "states", change)
    seen = found(run / "states", target)
    assert any((s, r) == ("error", rule) and said in m for s, r, m in seen), seen


def test_a_state_after_the_final_norm_is_found(run, target):
    def normed(i, r):
        last = r.last_SD.float()
        return dataclasses.replace(
            r,
            last_SD=(
                last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-5) * (target.final_norm_D() ** 3)
            ).to(r.last_SD.dtype),
        )

    reshard(run / "states", normed)
    assert any(r == "states-agreement" for _, r, _ in found(run / "states", target))


def test_a_truncated_shard_and_a_changed_one_are_found(run, target):
    path = next((run / "states").glob("shard-*.safetensors"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-7])
    assert [f[1] for f in found(run / "states", target)] == ["states-files"]
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert [f[1] for f in found(run / "states", target)] == ["states-files"]


def test_the_command_line_tells_folders_apart(run, target_folder):
    def call(*words):
        return CliRunner().invoke(eyas, ["check", *map(str, words)])

    assert "argmax" in call(run / "states", "--target", target_folder).stderr
    assert call(run / "states", "--target", target_folder).exit_code == 0
    assert "supervised tokens" in call(run / "conversations").stderr
    assert call(run / "conversations", "--fix").exit_code == 2
    assert data_rules.is_states(run / "states") and not data_rules.is_states(run / "conversations")
