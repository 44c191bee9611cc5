"""--json of every verb against docs/json-schema.json."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from eyas.cli import eyas
from tests.test_house import words

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "json-schema.json").read_text(encoding="utf-8"))


def test_every_verb_has_a_schema():
    verbs = {n for n, w in words(eyas).items() if not isinstance(w, dict)} | {"recipe show", "engine setup"}
    assert verbs == set(SCHEMA["$defs"])


@pytest.mark.parametrize(
    "verb", sorted(set(SCHEMA["$defs"]) - {"fetch", "init", "serve", "ps", "stop", "engine setup", "convert"})
)
def test_what_a_verb_prints_fits_its_schema(finished, verb, tmp_path):
    _, folder, _ = finished
    more = ["--yes"] if verb == "clean" else []
    if verb == "clean":
        (tmp_path / "recipe.yaml").write_bytes((folder / "recipe.yaml").read_bytes())
        folder = tmp_path
    result = CliRunner().invoke(eyas, [*verb.split(), str(folder), "--json", *more])
    value = json.loads(result.stdout)
    schema = {"$ref": f"#/$defs/{verb}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_convert_fits_its_schema(finished, tmp_path):
    drafter = finished[1] / "drafter" / "best"
    done = CliRunner().invoke(eyas, ["convert", str(drafter), str(tmp_path / "d"), "--to", "vllm", "--json"])
    jsonschema.validate(json.loads(done.stdout), SCHEMA["$defs"]["convert"])


def test_fetch_and_init_fit_their_schema(tmp_path, target_folder):
    from tests.conftest import save_target

    deep = save_target(tmp_path / "deep", layers=8)
    done = CliRunner().invoke(
        eyas, ["init", "--target", str(deep), "--out", str(tmp_path / "r.yaml"), "--json"]
    )
    jsonschema.validate(json.loads(done.stdout), SCHEMA["$defs"]["init"])
    there = tmp_path / "models" / "smollm2-135m"
    there.mkdir(parents=True)
    (there / "eyas_source.json").write_text("{}")
    done = CliRunner().invoke(eyas, ["fetch", "smollm2-135m", "--models", str(tmp_path / "models"), "--json"])
    jsonschema.validate(json.loads(done.stdout), SCHEMA["$defs"]["fetch"])
