"""plan --profile: the cost of drafting before there is a drafter, what would pay for it, and what the verdict makes of it."""

import json
import shutil

import pytest
from click.testing import CliRunner

from eyas import outside, pipeline, profiles
from eyas.bench import profile as profiling
from eyas.cli import eyas
from eyas.errors import UsageError
from eyas.generate.prompts import Prompt


@pytest.mark.parametrize("a, k, tau", [(0.0, 3, 1.0), (0.5, 1, 1.5), (0.5, 3, 1.875), (1.0, 3, 4.0)])
def test_tokens_a_step(a, k, tau):
    assert profiles.tau_of(a, k) == pytest.approx(tau)
    if a:
        assert profiles.needed(tau, k) == pytest.approx(a)


def test_what_costs_more_than_it_can_give_never_pays():
    assert profiles.needed(2.01, 1) is None and profiles.needed(1.0, 3) == 0.0
    cells = [profiles.Cost(1, 8, 1.3), profiles.Cost(3, 8, 2.2)]
    assert profiles.best(cells, 0.25)[0] is None
    assert profiles.best(cells, 0.5) == (1, pytest.approx(1.5 / 1.3))
    assert profiles.best(cells, 0.9) == (3, pytest.approx(3.439 / 2.2))


def test_the_profile_of_the_embedded_engine_is_kept_and_the_verdict_compares(finished, tmp_path):
    recipe = str(finished[0])
    shutil.copytree(finished[1], tmp_path / "run")
    shown = CliRunner().invoke(eyas, ["plan", recipe, "--run", str(tmp_path / "run"), "--profile", "--json"])
    assert shown.exit_code == 0, shown.output
    made = json.loads(shown.stdout)["profile"]
    assert [(c["k"], c["concurrency"]) for c in made["costs"]] == [(1, 1), (3, 1)]
    assert all(c["C"]["value"] > 0.5 and c["tau"] < 1.5 for c in made["costs"])
    assert (
        "tokens a step break even" in shown.stderr
        and "best k at concurrency 1 by acceptance: 0.3: " in shown.stderr
    )
    assert not (tmp_path / "run" / "profile" / "drafter").exists()
    before = (tmp_path / "run" / "profile.json").read_bytes()
    shown = CliRunner().invoke(eyas, ["plan", recipe, "--run", str(tmp_path / "run"), "--profile"])
    assert (
        "profile: measured already" in shown.output
        and (tmp_path / "run" / "profile.json").read_bytes() == before
    )
    verdict = pipeline.run_one("verdict", recipe, (), str(tmp_path / "run"))
    assert [r["k"] for r in verdict["profile"]] == [1, 3]
    assert any("the profile before training foretold the cost of drafting" in r for r in verdict["reasons"])


def test_another_shape_or_engine_is_measured_anew(finished, tmp_path):
    resolved, rundir, _ = pipeline.open_run(str(finished[0]), (), str(tmp_path / "run"))
    other, _, _ = pipeline.open_run(str(finished[0]), ("train.draft_vocab=64",), str(tmp_path / "run"))
    longer, _, _ = pipeline.open_run(str(finished[0]), ("train.epochs=9",), str(tmp_path / "run"))
    assert profiles.key(resolved) != profiles.key(other) and profiles.key(resolved) == profiles.key(longer)
    rundir.root.mkdir()
    (rundir / profiles.FILE).write_text(json.dumps({"key": profiles.key(resolved), "costs": []}))
    assert profiles.read(rundir, resolved) and profiles.read(rundir, other) is None


def test_what_another_engine_costs_is_measured_anew_and_not_compared(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "run")
    resolved, rundir, _ = pipeline.open_run(str(finished[0]), (), str(tmp_path / "run"))
    ci = {"value": 1.5, "low": 1.4, "high": 1.6}
    found = {"key": profiles.key(resolved), "engine": "hf of another year", "costs": [{"k": k, "concurrency": 1, "C": ci, "tau": 1.0} for k in (1, 3)]}  # fmt: skip
    (rundir / profiles.FILE).write_text(json.dumps(found))
    verdict = pipeline.run_one("verdict", str(finished[0]), (), str(tmp_path / "run"))
    assert "profile" not in verdict
    made = outside.profile(str(finished[0]), (), str(tmp_path / "run"))["profile"]
    assert made["engine"] == "hf"


def test_a_prompt_that_the_template_refuses_is_passed_over(finished, tmp_path, monkeypatch):
    resolved, _, _ = pipeline.open_run(str(finished[0]), (), str(tmp_path / "run"))
    tokenizer = resolved.target.tokenizer()
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + template
    )
    monkeypatch.setattr(type(resolved.target), "tokenizer", lambda *_: tokenizer)
    one, two = (Prompt(n, "a", ("hello",), system, True) for n, system in (("one", "be kind"), ("two", None)))
    assert [r.row_id for r in profiling._rows(resolved, [one, two])] == ["two"]


def test_without_prompts_it_says_so(finished, tmp_path):
    resolved, rundir, _ = pipeline.open_run(str(finished[0]), (), str(tmp_path / "run"))
    with pytest.raises(UsageError, match="no prompt to measure with"):
        profiling.run(resolved, rundir, [])
