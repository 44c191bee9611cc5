"""A warm start on Kimi-K2.5's stand-in from a parent in AQ-MedAI's shape: converted, probed, gated; and the six mismatches of the story."""

import json
import shutil

import pytest
import yaml

from eyas import pipeline
from eyas import target as targets
from eyas.contract import Norms
from eyas.convert import convert
from eyas.drafter import disk
from eyas.drafter.probe import Rows
from eyas.rundir import RunDir
from eyas.stores import states
from eyas.train import records
from tests import skilled
from tests.conftest import write_recipe
from tests.kimi import standin
from tests.stages.test_anywhere import PLANTED, edit, rebuilt

SHAPE = {**skilled.AQ, "head_dim": 24}  # beside width / heads = 16, as 128 beside 112


@pytest.fixture(scope="module")
def deep(tmp_path_factory, prompt_file):
    folder = tmp_path_factory.mktemp("kimi")
    model = standin(folder / "model", "--experts", "4", "--hidden", "64")
    recipe = write_recipe(folder / "r.yaml", model, prompt_file)
    body = yaml.safe_load(recipe.read_text())
    body["target"] |= {"aux_layers": skilled.AUX, "trust_remote_code": True}
    body["train"] = {"ttt_steps": 3, "epochs": 1, "tokens_per_step": 256, "micro_tokens": 128}
    recipe.write_text(yaml.safe_dump(body))
    pipeline.run(str(recipe), (), str(folder / "run"), None, "extract")
    return recipe, folder / "run", targets.load(model)


@pytest.fixture(scope="module")
def parent(deep, tmp_path_factory):
    _, run, target = deep
    listed = json.loads((run / "states" / "manifest.json").read_text())["content"]
    rows = [r.load() for r in states.refs(run / "states", listed)]
    made = skilled.drafter(target, Rows(rows, tuple(skilled.AUX)), Norms(False, "none", False), **SHAPE)
    folder = skilled.write(tmp_path_factory.mktemp("parent") / "aq", made)
    (folder / "contract.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("norm_before_residual")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_converted_probed_and_gated_without_loss(deep, parent, tmp_path):
    recipe, run, target = deep
    convert(parent, tmp_path / "parent", "sglang", None, target)
    nested = json.loads((tmp_path / "parent" / "config.json").read_text())["eagle_config"]
    assert (
        next(iter(nested.values())) == skilled.AUX
    )  # DeepSeek's class in SGLang takes our numbers as they are
    folder = shutil.copytree(run, tmp_path / "run")
    RunDir(folder).clear("train")
    made = pipeline.run(
        str(recipe), (f"train.init_from={tmp_path / 'parent'}", "train.lr=1e-30"), str(folder), None, "train"
    )
    gate = made["train"]["parent"]
    first = records.evals(folder / "train" / "evals.jsonl")[0]["tau"]["3"]["value"]
    assert first > 2 and gate["came"]["tau"] == pytest.approx(first, abs=1e-9)
    assert set(gate["axes"].values()) <= {"agrees", "undetermined", "not probed"}
    child = disk.read(folder / "drafter" / "best").contract
    assert (child.head_dim, child.rope_theta, child.latent) == (24, 1e6, None)


@pytest.mark.parametrize("fault", PLANTED)
def test_each_mismatch_of_the_story_is_refused_with_its_name(deep, parent, tmp_path, fault):
    change, kind, said = PLANTED[fault]
    if "map" in fault:
        change = edit(None, rebuilt(*deep[2].stop_ids))
    folder = shutil.copytree(parent, tmp_path / "parent")
    change(folder)
    recipe, run, _ = deep
    mine = shutil.copytree(run, tmp_path / "run")
    with pytest.raises(kind, match=said):
        pipeline.run(
            str(recipe),
            (f"train.init_from={folder}", "target.aux_layers=auto"),
            str(mine),
            "extract",
            "train",
        )
    assert not (mine / "drafter").exists()
