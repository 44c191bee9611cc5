"""Served parity: an engine's own steps beside the replay at the same positions, and what the kinds of steps that fall off say."""

import json
from dataclasses import replace

import pytest

from eyas import causes, pipeline
from eyas import target as targets
from eyas.check import parity, probing
from eyas.check.parity import Answer, Cell, Kind, Step
from eyas.contract import Norms
from eyas.drafter import probe
from eyas.drafter.replay import Interval
from eyas.engines import reading
from eyas.engines.hf import HFEngine
from eyas.engines.reading import Said
from eyas.errors import UsageError
from eyas.rundir import RunDir
from eyas.servers import serve
from tests import skilled
from tests.conftest import save_target, write_recipe

WORDS = ["fox", "hill", "mill", "road", "lamp", "rain", "door", "salt", "tree", "wool", "iron", "fish"]


@pytest.mark.parametrize(
    ("chunks", "finish", "steps"),
    [
        ([1, 2, 4, 1, 3], "length", [(0, 1), (2, 3), (6, 0)]),  # the last may be cut
        ([1, 2, 4], "length", [(0, 1), (2, 3)]),  # a whole step of k + 1 is none that was cut
        ([1, 2, 4], "stop", [(0, 1)]),
        ([2, 2, 1], "length", []),  # a prompt's own token comes alone: these chunks are no steps
        ([1, 2, 9, 1], "stop", [(0, 1)]),  # two steps in one chunk: nothing after it is known
        ([1], "stop", []),
        ([], "stop", []),
    ],
)
def test_steps_of_a_stream(chunks, finish, steps):
    assert [tuple(s) for s in parity.steps_of(chunks, 3, finish)] == steps


def test_answers_that_begin_another_are_read_once():
    said = [
        Said("a", [1, 2, 3], 1),
        Said("b", [1, 2, 3, 4, 5], 1),
        Said("c", [1, 2, 9], 1),
        Said("d", [1, 2, 3], 2),
    ]
    unique, of = parity.shared(said)
    assert [u.name for u in unique] == ["b", "a", "c", "d"][:1] + [
        unique[i].name for i in range(1, len(unique))
    ]
    assert unique[of[0]].name == "b" and unique[of[1]].name == "b"
    assert unique[of[2]].name == "c" and unique[of[3]].name == "d"


def test_cells_by_hand():
    """Two answers alone: served 1, 0 and 3 accepted where the replay has 1, 2 and 3; the first is the step after the prompt."""
    answers = [
        Answer("alone", "short", Said("a", [], 0), [Step(0, 1), Step(2, 0)]),
        Answer(
            "alone", "short", Said("b", [], 0), [Step(0, 3), Step(9, 1)]
        ),  # 9 lies beyond what was replayed
    ]
    cells = {str(c.kind): c for c in parity.compare(answers, [[1, 0, 2], [3, 0]], 3)}
    first, later = cells["alone, short, first step"], cells["alone, short, later steps"]
    assert (first.steps, first.served, first.replayed) == (2, 1.0, 1.0)
    assert (later.steps, later.served, later.replayed, later.apart.value) == (1, 0.0, 1.0, -1.0)


def cells(*low, deep=()):
    """Eight kinds of steps, of which those in `low` fall off; low, deep: (place, length, step), None for any."""

    def holds(kind, wanted):
        return any(
            all(w is None or w == getattr(kind, f) for f, w in zip(kind._fields, x, strict=True))
            for x in wanted
        )

    out = []
    for place in ("alone", "batched"):
        for length in ("short", "long"):
            for step in ("first", "later"):
                kind = Kind(place, length, step)
                off = -0.3 if holds(kind, low) else 0.0
                fall = -0.2 if holds(kind, deep) else 0.0
                out.append(
                    Cell(
                        kind,
                        100,
                        0.5 + off,
                        0.5,
                        Interval(off, off - 0.02, off + 0.02),
                        Interval(fall, fall - 0.02, fall + 0.02),
                    )
                )
    return out


@pytest.mark.parametrize(
    ("low", "deep", "signs", "words"),
    [
        ([], [], set(), "runs this drafter as the replay does"),
        ([(None, None, None)], [], {"everywhere"}, "loads or feeds the drafter otherwise"),
        ([("batched", None, None)], [], {"batched"}, "--enforce-eager"),
        ([(None, "long", None)], [], {"long"}, "rope's theta"),
        ([(None, None, "first")], [], {"prompt"}, "--max-num-batched-tokens"),
        ([(None, None, "later")], [], {"later"}, "k = 1"),
        ([("batched", "long", None)], [], {"batched", "long"}, "padding"),
        ([], [(None, None, None)], {"deep"}, "what is fed back differs"),
        ([], [(None, None, None)], {"deep"}, "-20.0% of 100 steps' deeper drafts"),
    ],
)
def test_kinds_that_fall_off_name_the_cause(low, deep, signs, words):
    found = cells(*low, deep=deep)
    assert parity.signs(found) == signs
    (finding,) = parity.findings(found)
    assert words in finding.message + finding.fix
    assert finding.severity == ("error" if signs else "info") and (finding.fix or not signs)


def test_too_few_steps_say_nothing():
    few = [c._replace(steps=3) for c in cells((None, None, None))]
    (finding,) = parity.findings(few)
    assert finding.severity == "unknown"


def test_an_engine_that_accepts_more_is_said():
    more = [c._replace(apart=Interval(0.2, 0.1, 0.3), served=0.7) for c in cells()]
    (finding,) = parity.findings(more)
    assert finding.severity == "error" and "accepts more than the replay" in finding.message


def test_causes_are_ranked_and_each_has_an_experiment():
    assert all(c.experiment and c.what for c in causes.CAUSES)
    found = causes.ranked({"everywhere"})
    assert len(found) == 3 and "loads or feeds" in found[0].what
    assert causes.ranked(set()) == [causes.LITTLE]
    assert "next: serve once with k = 1" in causes.why_apart([0.62, 0.2, 0.05], [0.63, 0.41, 0.25], None)


# ---- with a server that computes ----


@pytest.fixture(scope="module")
def deep(tmp_path_factory, prompt_file):
    """A recipe, its target, prompts, and a drafter that knows the answers to them by heart."""
    folder = tmp_path_factory.mktemp("deep")
    target = targets.load(save_target(folder / "target", layers=8, grows=1.5))
    recipe = write_recipe(folder / "deep.yaml", target.folder, prompt_file)
    prompts = [
        probing.Prompt(
            f"p{i}", [{"role": "user", "content": f"{WORDS[i % 12]} and {WORDS[(i * 7 + i // 12) % 12]} {i}"}]
        )
        for i in range(24)
    ]
    engine = HFEngine(target, "float32", "cpu", skilled.AUX)
    tokenizer = target.tokenizer()
    ids = [(p.name, probing.render(tokenizer, p.messages, 200)) for p in prompts]
    rows = reading.states_of(engine, reading.answered(engine, ids, 24))
    made = skilled.drafter(target, probe.Rows(rows, tuple(skilled.AUX)), Norms(False, "none", False))
    return recipe, target, prompts, skilled.write(folder / "drafter", made)


def look(deep, python, tmp_path, monkeypatch, change=None, env="FAKE_REAL: '1'", **asked):
    """Serve the drafter, changed in what its contract says, and compare with the one that was trained."""
    recipe, target, prompts, drafter = deep
    for name, value in {
        "ALONE": 6,
        "BATCHED": 16,
        "LONG": 4,
        "TOKENS": 16,
        "LONG_TOKENS": 64,
        **asked,
    }.items():
        monkeypatch.setattr(parity, name, value)
    place = RunDir(tmp_path / "place")
    best = place / "drafter" / "best"
    best.parent.mkdir(parents=True)
    from eyas.drafter import disk

    held = disk.read(drafter)
    held.contract = change(held.contract) if change else held.contract
    skilled.write(best, held)
    sets = (
        "engine.name=vllm",
        f"engine.python={python}",
        f"engine.env={{{env}}}",
        "target.aux_layers=[2, 4, 5]",
    )
    resolved, _, _ = pipeline.open_run(str(recipe), sets, str(tmp_path / "run"))
    with serve.running(resolved, place, "parity", 3) as server:
        return parity.look(drafter, target, server.url, prompts, probing.Place("float32"))


@pytest.mark.slow
def test_a_server_that_runs_the_drafter_as_it_was_trained(deep, fake_vllm, tmp_path, monkeypatch):
    found, body = look(deep, fake_vllm, tmp_path, monkeypatch)
    assert [f.severity for f in found] == ["info"] and "as the replay does" in found[0].message
    assert body["k"] == 3 and len(body["counters"]) == 3 and json.dumps(body)
    by = {tuple(c["kind"].values()): c for c in body["cells"]}
    assert by["alone", "short", "first"]["served"] > 0.6  # it drafts what it knows by heart
    assert all(c["served"] == c["replayed"] for c in body["cells"])


@pytest.mark.slow
def test_a_server_with_another_rope_is_told(deep, fake_vllm, tmp_path, monkeypatch):
    found, body = look(deep, fake_vllm, tmp_path, monkeypatch, lambda c: replace(c, rope_theta=1e7))
    assert [f.severity for f in found] == ["error"] and "the replay at the same positions" in found[0].message
    assert any(c["served"] < c["replayed"] - 0.2 for c in body["cells"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "said"), [("FAKE: 'no ids'", "no token ids"), ("FAKE: ok, FAKE_REAL: '1'", "drafts nothing")]
)
def test_a_server_that_cannot_be_compared(deep, fake_vllm, tmp_path, monkeypatch, env, said):
    if "nothing" in said:
        running = serve.running
        monkeypatch.setattr(
            serve, "running", lambda resolved, place, role, k: running(resolved, place, role, 0)
        )
    with pytest.raises(UsageError, match=said):
        look(deep, fake_vllm, tmp_path, monkeypatch, env=env)
