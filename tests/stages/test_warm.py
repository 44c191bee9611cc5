"""train.init_from: what is kept of the parent, what is measured first, and what is refused."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch
from click.testing import CliRunner

from eyas import pipeline
from eyas.check import stage as checking
from eyas.cli import eyas
from eyas.drafter import disk
from eyas.errors import ContractError, RecipeError
from eyas.recipe import SHIPPED_DRAFTERS
from eyas.rundir import RunDir, read_json
from eyas.stores import conversations
from eyas.train import evaluation, records
from tests.conftest import save_target, write_recipe


@pytest.fixture
def parent(finished, tmp_path):
    return shutil.copytree(finished[1] / "drafter" / "best", tmp_path / "parent")


def begun(finished, folder):
    """A run folder whose conversations and states are those of the finished run."""
    shutil.copytree(finished[1], folder)
    RunDir(folder).clear("train")
    return folder


def warm(finished, parent, folder, *sets):
    run = begun(finished, folder)
    out = pipeline.run(
        str(finished[0]),
        (f"train.init_from={parent}", "train.draft_vocab=128", *sets),
        str(run),
        "train",
        "bench",
    )
    return run, out


def test_contract_and_vocabulary_are_kept_and_the_parent_is_measured_first(
    finished, parent, tmp_path, capsys
):
    run, made = warm(finished, parent, tmp_path / "run", "train.ttt_steps=2")
    old, new = disk.read(parent), disk.read(run / "drafter" / "best")
    assert torch.equal(old.d2t_W, new.d2t_W)
    assert new.contract.norms == old.contract.norms and new.contract.aux_layers == old.contract.aux_layers
    assert new.contract.ttt_steps == old.contract.ttt_steps == 3  # trained for the deeper of both
    first, *rest = records.evals(run / "train" / "evals.jsonl")
    assert first["epoch"] == 0 and [e["epoch"] for e in rest] == [1, 2]
    assert first["tau"]["3"] == read_json(parent / "metrics.json")["tau"]["3"]
    gained = made["train"]["parent"]
    assert gained["tau"] == first["tau"]["3"]["value"]
    best = {e["epoch"]: e for e in [first, *rest]}[gained["best_epoch"]]
    assert gained["gain"]["value"] == pytest.approx(best["tau"]["3"]["value"] - gained["tau"])
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    before = next(i for i, line in enumerate(lines) if "before any step: held-out tau" in line)
    assert before < next(i for i, line in enumerate(lines) if "epoch 1: held-out tau" in line)
    assert any("training changed held-out tau" in x or "training added nothing" in x for x in lines)


def test_a_rate_too_small_to_change_anything_keeps_the_parent_and_says_so(finished, parent, tmp_path, capsys):
    run, made = warm(finished, parent, tmp_path / "run", "train.lr=1e-30")
    assert made["train"]["parent"]["best_epoch"] == 0
    assert read_json(run / "drafter" / "best" / "metrics.json")["epoch"] == 0
    before, after = (disk.tensors_of(p) for p in (parent, run / "drafter" / "best"))
    assert all(torch.equal(before[n], after[n]) for n in before)
    said = capsys.readouterr()
    assert "training added nothing" in said.out + said.err


def test_a_run_that_was_killed_while_finetuning_goes_on(finished, parent, tmp_path):
    whole, _ = warm(finished, parent, tmp_path / "whole")
    again = begun(finished, tmp_path / "again")
    sets = (f"train.init_from={parent}", "train.draft_vocab=128")
    pipeline.run(str(finished[0]), (*sets, "train.epochs=2"), str(again), "train", "train")
    state = again / "train" / "state" / "state.safetensors"
    assert state.is_file()
    (again / "train" / "manifest.json").unlink()  # as if killed before the last word
    pipeline.run(str(finished[0]), (*sets, "train.epochs=2"), str(again), None, "train")
    for name in ("train/evals.jsonl", "drafter/best/model.safetensors", "drafter/best/trained_on.txt"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()


def test_the_child_names_its_own_prompts_and_its_parents(finished, parent, tmp_path):
    (parent / "trained_on.txt").write_text("00000000deadbeef\n")
    run, _ = warm(finished, parent, tmp_path / "run")
    own = {r.prompt_key for r in conversations.read(run / "conversations", "train")}
    assert disk.trained_on(run / "drafter" / "best") == own | {"00000000deadbeef"}
    assert disk.trained_on(finished[1] / "drafter" / "best") == own


def test_held_out_prompts_that_the_parent_knows_are_named_and_left_out(finished, parent, tmp_path, capsys):
    held = {r.prompt_id: r.prompt_key for r in conversations.read(finished[1] / "conversations", "held_out")}
    known = sorted(held)[:2]
    (parent / "trained_on.txt").write_text("".join(f"{held[p]}\n" for p in known))
    run, made = warm(finished, parent, tmp_path / "run", "bench.limit=null")
    assert sorted(made["train"]["held_out_left_out"]) == known
    said = capsys.readouterr()
    assert "2 held-out prompts are left out" in said.out + said.err and known[0] in said.out + said.err
    rounds = read_json(run / "bench" / "round-000.json")
    rows = {r.row_id: r.prompt_id for r in conversations.read(run / "conversations", "held_out")}
    assert {rows[r["prompt"]] for r in rounds} == set(held) - set(known)

    (parent / "trained_on.txt").write_text("".join(f"{key}\n" for key in held.values()))
    with pytest.raises(ContractError, match="trained on all"):
        warm(finished, parent, tmp_path / "other")


def test_a_parent_that_does_not_say_what_it_knows_is_named(finished, parent, tmp_path, capsys):
    (parent / "trained_on.txt").unlink()
    run, _ = warm(finished, parent, tmp_path / "run")
    said = capsys.readouterr()
    assert "does not say what it was trained on" in said.out + said.err
    assert disk.trained_on(run / "drafter" / "best") is None


def test_another_vocabulary_maps_the_head_row_by_row(finished, parent, tmp_path, capsys):
    run, made = warm(finished, parent, tmp_path / "run", "train.draft_vocab=160", "train.lr=1e-30")
    old, new = disk.read(parent), disk.read(run / "drafter" / "best")
    assert new.contract.draft_vocab == 160
    both = sorted(set(old.kept_W.tolist()) & set(new.kept_W.tolist()))
    rows = [[d.kept_W.tolist().index(i) for i in both] for d in (old, new)]
    assert torch.equal(old.lm_head.weight[rows[0]], new.lm_head.weight[rows[1]])
    said = capsys.readouterr()
    assert f"head mapped anew, {len(both)} of 160 rows the parent's" in said.out + said.err
    assert made["train"]["parent"]["came"]["changed"] == [
        f"head mapped anew, {len(both)} of 160 rows the parent's"
    ]


def test_what_the_recipe_states_goes_before_the_parent_and_is_shown(finished, parent, tmp_path):
    sets = (f"train.init_from={parent}", "train.draft_vocab=128", "train.norms.output=false")
    resolved, _, values = pipeline.open_run(str(finished[0]), sets, str(tmp_path / "run"))
    assert not resolved.recipe.train.norms.output and "has True" in values["train.norms.output"].reason
    assert not resolved.recipe.train.norms.before_residual


def test_as_many_aux_layers_as_the_parent_takes_are_needed(finished, parent, tmp_path):
    with pytest.raises(RecipeError, match=r"takes the states of 3 layers"):
        pipeline.open_run(
            str(finished[0]), (f"train.init_from={parent}", "target.aux_layers=[0, 1]"), str(tmp_path / "run")
        )


def test_a_parent_of_another_target_is_refused_before_anything_is_generated(parent, prompt_file, tmp_path):
    other = save_target(tmp_path / "other", layers=4)
    recipe = write_recipe(tmp_path / "r.yaml", other, prompt_file)
    with pytest.raises(RecipeError, match="number of layers: the drafter .* expects 2, .* has 4"):
        pipeline.open_run(
            str(recipe), (f"train.init_from={parent}", "train.draft_vocab=128"), str(tmp_path / "run")
        )


@pytest.mark.parametrize("word", ["nowhere", "."])
def test_what_is_no_drafter_is_refused_with_the_names_of_those_that_ship(finished, tmp_path, word):
    with pytest.raises(RecipeError, match=r"not a drafter folder.*smollm2-135m"):
        pipeline.open_run(str(finished[0]), (f"train.init_from={word}",), str(tmp_path / "run"))


def test_recipe_show_tells_what_is_kept_of_the_parent():
    shown = CliRunner().invoke(eyas, ["recipe", "show", "smollm2-135m", "--json"])
    value = json.loads(shown.stdout)["train.draft_vocab"]
    assert (value["value"], value["source"]) == (16384, "derived") and "kept from smollm2-135m" in value[
        "reason"
    ]


def test_from_nothing_is_one_key_away():
    shown = CliRunner().invoke(
        eyas, ["recipe", "show", "smollm2-135m", "--set", "train.init_from=null", "--json"]
    )
    values = json.loads(shown.stdout)
    assert values["train.init_from"]["value"] is None
    assert (values["train.draft_vocab"]["value"], values["train.draft_vocab"]["source"]) == (8192, "default")


def test_another_parent_makes_training_stale(finished, parent, tmp_path):
    run, _ = warm(finished, parent, tmp_path / "run")
    weights = parent / "model.safetensors"
    tensors = disk.tensors_of(parent)
    tensors["fc.weight"] = tensors["fc.weight"] + 1
    from eyas.stores import tensors as files

    files.save(tensors, weights, {"format": "pt"})
    resolved, rundir, _ = pipeline.open_run(str(run), (), str(run))
    assert any("train.init_from" in d for d in pipeline.stale(pipeline.BY_NAME["train"], resolved, rundir))


def test_gain_by_hand():
    """Two conversations of 4 steps: 2 and 4 drafts accepted before, 6 and 4 after: tau 1.75 to 2.25."""
    found = evaluation.gain([[4, 2], [4, 4]], [[4, 6], [4, 4]])
    assert (
        found.value == pytest.approx(0.5)
        and found.low == pytest.approx(0.0)
        and found.high == pytest.approx(1.0)
    )


@pytest.mark.parametrize("folder", sorted(SHIPPED_DRAFTERS.iterdir()), ids=lambda p: p.name)
def test_shipped_drafters_are_healthy_small_and_say_what_they_are(folder):
    assert [f for f in checking.check(folder, None)[0] if f.severity != "info"] == []
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 32e6
    keys = disk.trained_on(folder)
    assert keys and all(len(k) == 16 for k in keys)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for needed in ("Q4_1", "mt_bench", "gsm8k", "humaneval", "alpaca", "qa", "eyas run", "Limits"):
        assert needed in card
    assert json.loads((folder / "metrics.json").read_text())["tau"]["3"]["value"] > 2


def test_the_manifest_of_a_warm_start_fits_its_schema(finished, parent, tmp_path):
    schema = json.loads((Path(__file__).parents[2] / "docs" / "json-schema.json").read_text(encoding="utf-8"))
    _, made = warm(finished, parent, tmp_path / "run")
    jsonschema.Draft202012Validator({"$ref": "#/$defs/train", "$defs": schema["$defs"]}).validate(
        made["train"]
    )
