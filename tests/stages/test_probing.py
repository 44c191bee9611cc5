"""eyas check --probe, as a user calls it: on a run, on a folder, on data that are not the target's."""

import json
import shutil

import pytest
from click.testing import CliRunner

from eyas.cli import eyas
from eyas.rundir import read_json
from tests.conftest import save_target


def check(*words):
    shown = CliRunner().invoke(eyas, ["check", *map(str, words)])
    return shown.exit_code, shown.output + str(shown.exception or "")


def test_a_run_is_probed_on_its_held_out_conversations(finished, tmp_path):
    run = shutil.copytree(finished[1], tmp_path / "run")
    code, said = check(run, "--probe")
    assert code in (0, 1), said
    assert "held-out" in said or "conversations of" in said
    body = read_json(run / "probe.json")
    assert {a["axis"] for a in body["axes"]} == {
        "map",
        "layers",
        "fc_norm",
        "before_residual",
        "rope",
        "fed_back",
        "teacher",
    }
    assert body["pairs"] > 0 and "trained for" in said
    # a drafter of some hundred answers of a random target: it knows little, and that is said
    assert "these weights were not trained for this target" in said


@pytest.mark.parametrize("on", ["conversations", "states"])
def test_a_folder_is_probed_on_data(finished, target_folder, on):
    code, said = check(
        finished[1] / "drafter" / "best",
        "--target",
        target_folder,
        "--probe",
        "--on",
        finished[1] / on,
        "--json",
    )
    assert code in (0, 1), said
    assert ("with the states of layers" in said) == (on == "states") and ("conversations of" in said) == (
        on == "conversations"
    )


def test_answers_are_written_where_none_are_given(finished, target_folder, monkeypatch):
    from eyas.check import probing

    monkeypatch.setattr(probing, "CONVERSATIONS", 8)
    monkeypatch.setattr(probing, "TOKENS", 12)
    code, said = check(finished[1] / "drafter" / "best", "--target", target_folder, "--probe")
    assert code in (0, 1) and "answers that the target wrote now" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "x"), "--on and --url are for --probe"),
        (("--url", "http://127.0.0.1:9"), "--on and --url are for --probe"),
        (("--probe",), "--probe needs --target"),
        (("--probe", "--on", "x", "--url", "y"), "leave --on out"),
    ],
)
def test_words_that_do_not_go_together(finished, words, said):
    code, text = check(finished[1] / "drafter" / "best", *words)
    assert code == 2 and said in text


def test_data_of_another_target_are_refused(finished, tmp_path):
    other = save_target(tmp_path / "other", seed=7)
    for on in ("conversations", "states"):
        _, said = check(
            finished[1] / "drafter" / "best", "--target", other, "--probe", "--on", finished[1] / on
        )
        assert "is of another target" in said


def test_what_is_no_data_is_refused(finished, target_folder, tmp_path):
    _, said = check(finished[1] / "drafter" / "best", "--target", target_folder, "--probe", "--on", tmp_path)
    assert "neither conversations nor states" in said


def test_nobody_at_the_address_is_said(finished, target_folder):
    _, said = check(
        finished[1] / "drafter" / "best", "--target", target_folder, "--probe", "--url", "http://127.0.0.1:9"
    )
    assert "nobody answers" in said


def test_what_our_network_does_not_compute_is_said(finished, target_folder, tmp_path):
    folder = shutil.copytree(finished[1] / "drafter" / "best", tmp_path / "d")
    (folder / "contract.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    _, said = check(folder, "--target", target_folder, "--probe", "--on", finished[1] / "conversations")
    assert "its activation is gelu" in said
