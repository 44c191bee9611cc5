import json
import shutil

import pytest
from click.testing import CliRunner

from eyas import pipeline
from eyas import recipe as recipes
from eyas.cli import eyas
from tests.conftest import save_target


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "run")
    return tmp_path / "run"


def invoke(*words, **more):
    result = CliRunner().invoke(eyas, [str(w) for w in words], catch_exceptions=False, **more)
    assert result.exit_code == 0, result.output
    return result


def test_status_of_a_finished_a_changed_and_a_begun_run(copy):
    rows = json.loads(invoke("status", copy, "--json").stdout)
    assert [(r["stage"], r["state"]) for r in rows] == [(n, "done") for n in pipeline.NAMES]
    rows = {
        r["stage"]: r for r in json.loads(invoke("status", copy, "--json", "--set", "train.epochs=3").stdout)
    }
    assert rows["train"]["state"] == "stale" and "train.epochs was 2, is now 3" in rows["train"]["note"]
    assert rows["generate"]["state"] == "done"
    (copy / "states" / "manifest.json").unlink()
    rows = {r["stage"]: r for r in json.loads(invoke("status", copy, "--json").stdout)}
    assert rows["extract"]["state"] == "begun" and "goes on with" in rows["extract"]["note"]
    assert rows["train"]["note"] == "waits for extract"


def test_clean_asks_keeps_the_best_drafter_and_the_records(copy):
    result = invoke("clean", copy, input="n\n")
    assert "Remove these?" in result.output and list((copy / "states").glob("shard-*"))
    before = {p.relative_to(copy) for p in copy.rglob("*") if p.is_file()}
    told = json.loads(invoke("clean", copy, "--yes", "--json").stdout)
    gone = before - {p.relative_to(copy) for p in copy.rglob("*") if p.is_file()}
    assert told["freed_bytes"] > 0
    assert {p.parts[0] for p in gone} == {"states", "drafter", "train"}
    assert all("best" not in p.parts and p.name != "manifest.json" for p in gone)
    again = pipeline.run(str(copy), (), None)
    assert again["verdict"]["fingerprint"], "a cleaned run is still a finished run"
    result = CliRunner().invoke(eyas, ["clean", str(copy), "--yes"])
    assert "nothing to remove" in result.output


def test_init_writes_a_recipe_that_reads_back_with_every_default(tmp_path):
    target = save_target(tmp_path / "my-model", layers=8)
    out = tmp_path / "mine.yaml"
    invoke("init", "--target", target, "--out", out)
    read, values = recipes.read(out)
    assert read.name == "my-model" and read.target.model == str(target)
    plain, _ = recipes.read(recipes.find(str(out)), ())
    assert plain == read
    default = recipes.Recipe.model_validate({"name": "my-model", "target": {"model": str(target)}})
    assert read == default
    assert out.read_text().count("#") > 30
    result = CliRunner().invoke(eyas, ["init", "--target", str(target), "--out", str(out)])
    assert result.exit_code != 0 and "there already" in str(result.exception)
    assert values["train.lr"].source == "recipe"
