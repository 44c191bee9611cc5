"""Steps that must change nothing, and the batch that is tried first."""

import json
import random
import shutil

import pytest
import torch

from eyas import pipeline
from eyas.drafter.batch import pack
from eyas.drafter.gradients import Gradients
from eyas.errors import ContractError, SurroundingsError
from eyas.train import checkpoint, optimizer, stage, vocabulary
from eyas.train.data import load
from eyas.train.skips import IN_A_ROW, Skips
from eyas.train.updates import SPIKE, STEADY, TTT, Updates
from tests.drafter.test_gradients import NORMS, made_up, rows_of

KINDS = ["adamw", "muon"]


def new(kind="adamw"):
    """Updates of a small drafter, and three batches."""
    chance = random.Random(3)
    made, teacher = made_up(NORMS[1], chance)
    batches = [pack(rows_of(chance, made, 3)) for _ in range(3)]
    return Updates(made, teacher, torch.float32, TTT(3, 0.8), kind), batches


def values(updates):
    moments = [m for p in updates.drafter.parameters() for m in updates.optimizer.state.get(p, {}).values()]
    return [t.clone() for t in [*updates.drafter.parameters(), *moments]]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["last_MD", "key_aux_KLD"])
def test_a_step_that_is_not_finite_changes_nothing_and_leaves_nothing_behind(what, kind):
    updates, (first, bad, second) = new(kind)
    getattr(bad, what)[0] = float("nan")
    updates.apply([first], 1e-2)
    before = values(updates)
    done = updates.apply([bad], 1e-2)
    assert done.skipped == 1 and same(values(updates), before)
    assert updates.apply([second], 1e-2).skipped == 0 and not same(values(updates), before)
    other, (first, _, second) = new(kind)
    for batch in (first, second):
        other.apply([batch], 1e-2)
    assert same(values(updates), values(other)) and updates.usual == other.usual


def test_a_loss_far_above_the_usual_one_is_skipped_once_there_is_a_usual_one():
    updates, (batch, *_) = new()
    loss = updates.apply([batch], 0.0).loss
    for counted, usual, skipped in [
        (STEADY - 1, loss / 100, 0),
        (STEADY, loss / (SPIKE + 0.1), 1),
        (STEADY, loss / (SPIKE - 0.1), 0),
    ]:
        updates.counted.fill_(counted)
        updates.usual.copy_(usual)
        done = updates.apply([batch], 0.0)
        assert done.skipped == skipped and done.usual == usual
        assert (updates.usual == usual) == bool(skipped)  # a spike is no part of what is usual


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_skipped_a_step_resumes_exactly(tmp_path, kind):
    updates, (first, bad, second) = new(kind)
    bad.last_MD[0] = float("nan")
    for batch in (first, bad):
        updates.apply([batch], 1e-2)
    path = tmp_path / "state.safetensors"
    checkpoint.save(
        path, updates.drafter, updates.optimizer, {"step": 2, "skips": {"count": 1, "in_a_row": 1}}
    )
    resumed, _ = new(kind)
    checkpoint.load(path, resumed.drafter, resumed.optimizer)
    resumed.gradients.refresh()
    for u in (updates, resumed):
        u.apply([second], 1e-2)
    assert same(values(updates), values(resumed))


def test_muon_moves_matrices_and_adamw_the_rest():
    updates, (batch, *_) = new("muon")
    updates.apply([batch], 1e-2)
    remembered = {n: set(updates.optimizer.state[p]) for n, p in updates.drafter.named_parameters()}
    for name, held in remembered.items():
        matrix = name.endswith("proj.weight") or name == "fc.weight"
        assert held == ({"momentum_buffer"} if matrix else {"step", "exp_avg", "exp_avg_sq"}), name


@pytest.mark.parametrize(
    "wanted, products, kind",
    [("auto", torch.bfloat16, "muon"), ("auto", torch.float32, "adamw"), ("muon", torch.float32, "muon")],
)
def test_the_optimizer_follows_what_is_native_or_the_recipe(wanted, products, kind):
    assert optimizer.choose(wanted, products).value == kind


def record(step, loss=float("nan")):
    return {"step": step, "loss": loss, "grad_norm": 1.0}


def test_a_skipped_step_is_a_line_with_its_reason_and_rows(tmp_path):
    skips = Skips(tmp_path / "steps.jsonl", 1000, 100)
    line = skips.skipped(record(7), 2.0, ["a", "b", "c", "d"])
    assert line["skipped"] == "its loss is not finite" and line["rows"] == ["a", "b", "c", "d"]
    assert json.loads(json.dumps(line, allow_nan=False))["loss"] is None
    assert "9.000, is above 4 times the usual 2.000" in skips.skipped(record(8, 9.0), 2.0, ["a"])["skipped"]


def test_too_many_in_a_row_or_in_all_stop_with_the_rows(tmp_path):
    skips = Skips(tmp_path / "steps.jsonl", 1000, 100)
    for step in range(IN_A_ROW - 1):
        skips.skipped(record(step), 2.0, ["a"])
    with pytest.raises(
        ContractError, match=rf"{IN_A_ROW} steps in a row .*step 4: its loss .*rows a, b, c, …"
    ):
        skips.skipped(record(4), 2.0, ["a", "b", "c", "d"])
    skips = Skips(tmp_path / "steps.jsonl", 1000, 100)
    for step in range(20):
        skips.skipped(record(step), 2.0, ["a"])
        skips.passed()
    with pytest.raises(ContractError, match="21 steps were skipped, more than 20"):
        skips.skipped(record(21), 2.0, ["a"])
    with pytest.raises(ContractError, match="1 steps in a row"):
        Skips(tmp_path / "steps.jsonl", 4, 1).skipped(record(0), 2.0, ["a"])


def test_a_run_passes_over_a_step_and_says_so(recipe_file, finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished[1], tmp_path / "run")
    real, calls = Gradients.add, []

    def poisoned(*args):
        loss = real(*args)
        calls.append(0)
        return loss._replace(total=loss.total * float("nan")) if len(calls) == 2 else loss

    monkeypatch.setattr(Gradients, "add", poisoned)
    found = pipeline.run(str(finished[0]), (), str(tmp_path / "run"), first="train", last="train")
    assert found["train"]["skipped_steps"] == 1
    lines = [json.loads(x) for x in (tmp_path / "run" / "train" / "steps.jsonl").read_text().splitlines()]
    (skipped,) = [x for x in lines if "skipped" in x]
    assert skipped["rows"] and skipped["loss"] is None
    assert "skipped: its loss is not finite (rows " in capsys.readouterr().err


@pytest.fixture
def trainer(finished):
    resolved, rundir, _ = pipeline.open_run(str(finished[0]), (), str(finished[1]))
    data = load(resolved, rundir)
    return stage.Trainer(resolved, rundir, data, vocabulary.draft(resolved, data))


def test_the_largest_batch_is_tried_and_leaves_no_trace(trainer, monkeypatch):
    tried, real = [], Gradients.add
    monkeypatch.setattr(
        Gradients, "add", lambda self, batch, pairs: tried.append(batch) or real(self, batch, pairs)
    )
    before = values(trainer.updates)
    trainer.try_largest()
    groups = [g for epoch in trainer.plan for rows in epoch for g in trainer._groups(rows)]
    largest = max(groups, key=trainer._peak)
    assert [b.pairs for b in tried] == [sum(trainer.pairs[i] for i in largest)]
    assert same(values(trainer.updates), before) and not trainer.updates.gradients.w.begun


def test_a_batch_that_does_not_fit_is_refused_before_training_begins(trainer, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Gradients, "add", full)
    with pytest.raises(
        SurroundingsError,
        match=r"rows of [\d,]+ tokens, does not fit .*needs some .*Set train.micro_tokens below",
    ):
        trainer.try_largest()
