"""bench on servers: healthy ones, and ones that die, crawl, break off, count others' traffic, or serve something else."""

import json

import pytest
from click.testing import CliRunner

from eyas import outside, pipeline
from eyas.bench import load, measure
from eyas.bench.load import Ask, Load, Place
from eyas.cli import eyas
from eyas.engines import vllm
from eyas.errors import SurroundingsError, UsageError
from eyas.rundir import read_json
from eyas.servers import records
from tests.servers.test_serve import fits

ASKS = [Ask(f"r{i}", "d", [5 + i, 6, 7], None) for i in range(4)]
QUICK = ("bench.limit=4", "bench.max_tokens=12", "bench.rounds=2", "bench.concurrency=[1, 3]")


def place(url, k):
    return Place(url, "m", k, "the server", vllm.COUNTERS)


def bench(url, baseline, folder, *sets):
    return outside.bench_url(url, baseline, None, (*QUICK, *sets), str(folder))


def test_the_stream_says_the_same_of_steps_as_the_counters(running):
    url = running(k=3)
    made = load.measure(place(url, 3), load.wanted(ASKS, 2), Load(2, 20, 0.0, False), 0, 30)
    assert len(made.requests) == 6 and made.foreign == 0 and made.counters.finished == 6
    assert made.counters.drafts == sum(r.steps for r in made.requests)
    at = [sum(r.accepted_at[i] for r in made.requests) for i in range(3)]
    assert [made.counters.accepted_at[i] for i in range(3)] == at and sum(at) > 0
    for r in made.requests:
        assert len(r.ids) == 20 and r.steps + sum(r.accepted_at) == r.decoded == 19
        assert len(r.times) == r.steps + 1 and r.prefill_s == pytest.approx(r.times[0], abs=1e-4)
        assert r.prefill_s + r.decode_s == pytest.approx(r.times[-1], abs=1e-4)
    assert load.read_round(json.loads(json.dumps(made.as_json()))) == made


def test_running_servers_are_measured_compared_and_judged(running, tmp_path):
    url, baseline = running(k=3), running()
    body = bench(url, baseline, tmp_path / "b")
    assert [(c["concurrency"], c["k"]) for c in body["cells"]] == [(1, 3), (3, 3)]
    for cell in body["cells"]:
        assert cell["refused"] is None and cell["tau_from"] == "counters"
        assert 1 < cell["S"]["value"] <= cell["tau"]["value"] < 4
        assert cell["outputs"] == {"equal": 4, "near_tie": 0, "fault": 0}
        assert cell["probes"]["schema"]["kind"] == cell["probes"]["long"]["kind"] == "right"
        assert (
            cell["probes"]["tool"]["kind"] == "refused"
            and "--tool-call-parser" in cell["probes"]["tool"]["detail"]
        )
        assert cell["throughput_tokens_per_s"]["drafter"] > 0 and cell["cached_share"] == 0
        assert cell["sampled"]["temperature"] == 0.8 and cell["sampled"]["unlikely"] is None
    assert (tmp_path / "b" / "bench" / "requests.parquet").is_file()
    fits("bench", body)
    shown = CliRunner().invoke(eyas, ["verdict", str(tmp_path / "b" / "bench.json")])
    assert shown.exit_code == 0 and "YES: ship it" in shown.output
    verdict = read_json(tmp_path / "b" / "verdict.json")
    assert verdict["loads"][1]["concurrency"] == 3
    fits("verdict", verdict)


def test_without_a_folder_an_unfinished_measurement_goes_on_and_a_finished_one_is_kept(
    running, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    url, baseline = running(k=2), running()
    outside.bench_url(url, baseline, None, QUICK, None)
    (first,) = (tmp_path / "runs").iterdir()
    (first / "bench.json").unlink()
    kept = (first / "bench" / "k2-c1-round-000.json").read_bytes()
    outside.bench_url(url, baseline, None, QUICK, None)
    assert list((tmp_path / "runs").iterdir()) == [first]
    assert (first / "bench" / "k2-c1-round-000.json").read_bytes() == kept
    outside.bench_url(url, baseline, None, (*QUICK, "bench.max_tokens=6"), None)
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_one_server_alone_gives_latencies_and_acceptance_and_no_verdict(running, tmp_path):
    body = bench(running(k=2), None, tmp_path / "b")
    assert body["cells"] == [] and [a["concurrency"] for a in body["alone"]] == [1, 3]
    assert body["alone"][0]["tau"]["value"] > 1 and body["alone"][0]["ttft_s"]["value"] > 0
    shown = CliRunner().invoke(eyas, ["verdict", str(tmp_path / "b" / "bench.json")])
    assert shown.exit_code == 1 and "no valid measurement" in shown.output


def test_other_traffic_refuses_the_cell(running, tmp_path):
    body = bench(running(k=3, FAKE="foreign"), running(), tmp_path / "b")
    assert all("other traffic" in c["refused"] and c["tau_from"] == "stream" for c in body["cells"])


def test_servers_without_ids_are_measured_by_chat(running, tmp_path):
    body = bench(running(k=3, FAKE="no ids"), running(FAKE="no ids"), tmp_path / "b")
    assert all(c["S"]["value"] > 0 and c["C"] is None and c["outputs"] is None for c in body["cells"])


@pytest.mark.parametrize(
    ("drafting", "plain", "words"),
    [
        ({"k": 3, "FAKE": "other template"}, {}, "read the same prompt as other ids"),
        ({}, {}, "drafts nothing"),
        ({"k": 3}, {"k": 2}, "drafts too"),
    ],
)
def test_servers_that_cannot_be_compared_are_refused_by_name(running, tmp_path, drafting, plain, words):
    with pytest.raises(UsageError, match=words):
        bench(running(**drafting), running(**plain), tmp_path / "b")


def test_answers_that_the_drafter_changes_are_faults(running, tmp_path):
    body = bench(running(k=3, FAKE="changed"), running(), tmp_path / "b")
    assert body["cells"][0]["outputs"] == {"equal": 0, "near_tie": 0, "fault": 4}
    assert body["cells"][0]["probes"]["long"]["kind"] == "wrong"
    shown = CliRunner().invoke(eyas, ["verdict", str(tmp_path / "b" / "bench.json")])
    assert (
        "4 greedy answers differ" in shown.output
        and "the long probe went right without the drafter" in shown.output
    )


def test_sampled_answers_that_are_noise_are_a_no_whatever_greedy_ones_gain(running, tmp_path):
    """As with vLLM 0.32.0's CPU build: greedy answers equal, sampled ones of another distribution, a healthy server."""
    body = bench(running(k=3, FAKE="noise"), running(), tmp_path / "b")
    assert (
        body["cells"][0]["outputs"]["equal"] == 4
        and "surprises the target by 9.00 nats" in body["cells"][0]["sampled"]["unlikely"]
    )
    shown = CliRunner().invoke(eyas, ["verdict", str(tmp_path / "b" / "bench.json")])
    assert (
        shown.exit_code == 1
        and "it changes sampled answers" in shown.output
        and "YES: ship it" in shown.output
    )
    file = [str(tmp_path / "b" / "bench.json"), "--set", "verdict.traffic=greedy"]
    shown = CliRunner().invoke(eyas, ["verdict", *file])
    assert shown.exit_code == 0 and "For greedy requests alone: YES" in shown.output


def test_a_broken_schema_is_seen(running, tmp_path):
    body = bench(running(k=3, FAKE="breaks schema"), running(), tmp_path / "b")
    assert body["cells"][0]["probes"]["schema"]["kind"] == "wrong"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dies later", "failed at .* in round .*(broke off|nobody answers).*the same command again"),
        ("breaks", "broke off in the middle of an answer"),
        ("crawls", "took more than 2 s.*warm-up allowed"),
    ],
)
def test_a_server_that_fails_in_mid_bench_is_named_and_what_was_measured_is_kept(
    running, tmp_path, monkeypatch, kind, words
):
    monkeypatch.setattr(load, "CRAWL_FLOOR_S", 2.0)
    baseline = running()
    with pytest.raises(SurroundingsError, match=words):
        bench(running(k=3, FAKE=kind, FAKE_AFTER="24"), baseline, tmp_path / "b")
    kept = sorted(p.name for p in (tmp_path / "b" / "bench").glob("k*-round-*.json"))
    assert "k0-c1-round-000.json" in kept and "k3-c1-round-000.json" in kept and len(kept) < 8
    first = (tmp_path / "b" / "bench" / "k3-c1-round-000.json").read_bytes()
    with pytest.raises(UsageError, match="other servers"):
        bench(running(k=3), baseline, tmp_path / "b")
    assert (tmp_path / "b" / "bench" / "k3-c1-round-000.json").read_bytes() == first


def test_nobody_at_the_address(tmp_path):
    with pytest.raises(SurroundingsError, match="nobody answers"):
        bench("http://127.0.0.1:9", None, tmp_path / "b")
    shown = CliRunner().invoke(eyas, ["bench"])
    assert shown.exit_code == 2 and "--url" in shown.output


def served(finished, tmp_path, python, *sets):
    """The finished run's recipe in the fake vLLM that answers with the real tiny target."""
    words = ("engine.name=vllm", f"engine.python={python}", "engine.env={FAKE_REAL: '1'}", *sets)
    return pipeline.run(str(finished[0]), words, str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_the_whole_life_in_a_server(finished, fake_vllm, decoy, tmp_path, monkeypatch, together):
    """Answers, acceptance and outputs are the target's own: the server computes them with the embedded engine."""
    from eyas.servers import serve
    from eyas.target import Decision

    monkeypatch.setattr(serve, "fit_together", lambda *_: Decision(together, "the test says so"))
    made = served(finished, tmp_path, fake_vllm, "bench.k=[3]", "bench.concurrency=[1, 2]")
    assert made["generate"]["engine"].startswith("vLLM 0.32.0") and made["generate"]["read_otherwise"] == 0
    assert made["extract"]["checks"]["greedy_agreement"] == 1.0
    assert made["bench"]["side_by_side"] is together
    for cell in made["bench"]["cells"]:
        assert cell["tau_replayed"] == pytest.approx(cell["tau"]["value"], rel=0.05)
        assert cell["outputs"] == {"equal": 3, "near_tie": 0, "fault": 0}
        assert cell["p_replayed"] == pytest.approx(cell["p"], abs=0.08)
    assert len(made["verdict"]["loads"]) == 2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Still the same model?" in page and "Under load" in page
    assert records.every() == []
    embedded = {
        r.prompt_id: r.completion_ids for r in rows(finished[1]) if r.split == "held_out" and not r.turn
    }
    assert {
        r.prompt_id: r.completion_ids for r in rows(tmp_path / "run") if r.split == "held_out" and not r.turn
    } == embedded


def rows(folder):
    from eyas.stores import conversations

    return list(conversations.read(folder / "conversations"))


def test_a_server_of_another_model_cannot_generate_and_one_without_ids_neither(finished, running, tmp_path):
    for kind, words in (("ok", "reads none of our prompts"), ("no ids", "returns no token ids")):
        sets = ("engine.name=vllm", f"engine.url={running(FAKE=kind)}")
        with pytest.raises(UsageError, match=words):
            pipeline.run(str(finished[0]), sets, str(tmp_path / kind), last="generate")
        assert not list((tmp_path / kind / "conversations").glob("part-*"))


def test_a_server_that_dies_while_generating_is_explained_by_its_log(finished, fake_vllm, tmp_path):
    sets = (
        "engine.name=vllm",
        f"engine.python={fake_vllm}",
        "engine.env={FAKE_REAL: '1', FAKE: dies later, FAKE_AFTER: '9'}",
    )
    with pytest.raises(SurroundingsError, match="no longer well: the GPU's memory is too small"):
        pipeline.run(str(finished[0]), sets, str(tmp_path / "run"), last="generate")
    assert records.every() == []


def test_figures_of_a_load_by_hand():
    """Two at once, one token a second each without, two a second with the drafter; the wait for the first token is 1 s."""
    plain = measure.Request(0, "a", "d", 0, 5, list(range(11)), "length", 10, [], 1.0, 10.0, 2)
    fast = measure.Request(0, "a", "d", 1, 5, list(range(11)), "length", 5, [5], 1.0, 5.0, 2)
    (cell,) = measure.cells(
        [plain, fast], 0.95, {(2, 0): 11.0, (2, 1): 6.0}, {(2, 1): measure.Counted(5, [4.0], 0)}
    )
    assert cell["S"]["value"] == pytest.approx(2) and cell["S_answer"]["value"] == pytest.approx(11 / 6)
    assert cell["tau"]["value"] == pytest.approx(1.8) and cell["p"] == pytest.approx([0.8])
    assert cell["throughput_tokens_per_s"] == {
        "baseline": pytest.approx(1.0),
        "drafter": pytest.approx(11 / 6),
    }
    assert cell["baseline"]["tpot_s"]["value"] == pytest.approx(1.0) and cell["ttft_s"][
        "value"
    ] == pytest.approx(1.0)
    assert "above the acceptance length" in cell["refused"]


def test_a_killed_run_of_rounds_goes_on_after_the_last(running, tmp_path):
    url, baseline = running(k=3), running()
    bench(url, baseline, tmp_path / "b")
    gone = tmp_path / "b" / "bench" / "k3-c3-round-001.json"
    kept = {p.name: p.read_bytes() for p in gone.parent.glob("k*-round-*.json")}
    gone.unlink()
    bench(url, baseline, tmp_path / "b")
    now = {p.name: p.read_bytes() for p in gone.parent.glob("k*-round-*.json")}
    assert set(now) == set(kept) and all(now[n] == kept[n] for n in kept if n != gone.name)
