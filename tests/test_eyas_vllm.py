"""plugins/eyas-vllm: steps of a runner in, rows out; what it refuses; a buffer that waits for a slow disk; a disk that fails."""

import importlib.util
import json
import random
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines import vllm
from eyas.errors import ContractError, SurroundingsError
from eyas.stores.steps import NO_ID, Steps
from tests.servers.fake_runner import Runner

FOLDER = Path(__file__).parents[1] / "plugins" / "eyas-vllm"
LAYERS, HIDDEN, VOCAB = (2, 5, 9), 8, 50


def fresh():
    """The plugin, as a process that vLLM starts has it."""
    spec = importlib.util.spec_from_file_location("eyas_vllm_fresh", FOLDER / "eyas_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.writes = lambda: True
    return module


@pytest.fixture
def runner(tmp_path, monkeypatch):
    def start(dtype=torch.float32, tokens=64, **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        plugin, kind = fresh(), type("Here", (Runner,), {})
        plugin.patch(kind, LAYERS, str(tmp_path / "s"))
        return kind(LAYERS, HIDDEN, dtype, tokens)

    return start


def sequence(seed, length):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, VOCAB, (length,), generator=g).tolist(), torch.randn(length, 2, HIDDEN, generator=g),
        torch.randn(length, HIDDEN, generator=g), torch.randint(0, VOCAB, (length,), generator=g),
    )  # fmt: skip


def run(runner, *steps):
    for step in steps:
        runner.execute_model(runner.scheduled(step))


def test_without_its_variables_it_does_nothing(monkeypatch):
    monkeypatch.delenv("EYAS_STATES_DIR", raising=False)
    before = set(sys.modules)
    fresh().register()
    assert not {m for m in set(sys.modules) - before if m.split(".")[0] in ("vllm", "torch")}
    monkeypatch.setenv("EYAS_STATES_DIR", "/anywhere")
    with pytest.raises(ImportError, match="vllm"):  # with them it goes to work, and there is no vLLM here
        fresh().register()


def test_prefills_in_parts_decodes_and_strangers_in_one_batch(runner, tmp_path):
    """Requests mixed in every step, one of them nobody's; the buffers of the engine are written over after each step."""
    r = runner()
    sequences = {"a": sequence(1, 9), "b": sequence(2, 6), "x": sequence(3, 7)}
    for name, s in sequences.items():
        r.add(name, *s, VOCAB, row=None if name == "x" else f"row {name}")
    run(r, [("x", 0, 3), ("a", 0, 5)], [("a", 5, 1), ("x", 3, 4), ("b", 0, 4)], [("b", 4, 1), ("a", 6, 3)])
    steps = Steps.opened(tmp_path / "s")
    steps.wait({"row a": 9, "row b": 5})
    for name, start, length in (("a", 5, 9), ("b", 4, 5)):
        ids, aux, last, _ = sequences[name]
        row = steps.row(f"row {name}", ids, start, length)
        assert row.ids_T.tolist() == ids and row.start == start
        assert torch.equal(row.aux_TLD[:length], aux[:length].bfloat16())
        assert torch.equal(row.last_SD[:length], last[:length])
        assert not row.last_SD[length:].any()
    known = steps.row("row a", sequences["a"][0], 5, 9).top1_T
    assert [i for i in range(9) if known[i] != NO_ID] == [4, 5, 8]  # the last row of each of its steps
    assert known[8] == sequences["a"][3][8]
    assert set(steps.pieces) == {"row a", "row b"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_preempted_request_is_read_anew_and_the_last_reading_counts(runner, tmp_path, dtype):
    r = runner(dtype, EYAS_STATES_DTYPE="float32" if dtype == torch.float32 else "bfloat16")
    ids, aux, last, top1 = sequence(4, 8)
    r.add("a", ids, aux + 1, last, top1, VOCAB, "a")
    run(r, [("a", 0, 4)], [("a", 4, 1)])
    r.add("a", ids, aux, last, top1, VOCAB, "a")
    run(r, [("a", 0, 6)], [("a", 6, 1)])
    steps = Steps.opened(tmp_path / "s")
    steps.wait({"a": 7})
    assert torch.equal(steps.row("a", ids, 4, 7).aux_TLD[:7].float(), aux[:7].to(dtype).float())


def test_rows_that_are_not_whole_or_not_theirs_are_refused(runner, tmp_path):
    r = runner()
    ids, aux, last, top1 = sequence(5, 8)
    r.add("a", ids, aux, last, top1, VOCAB, "a")
    run(r, [("a", 0, 3)], [("a", 5, 3)])
    steps = Steps.opened(tmp_path / "s")
    steps.wait({"a": 8})
    with pytest.raises(ContractError, match="position 3 of 8 holds id .* none was fed"):
        steps.row("a", ids, 2, 8)
    other = [*ids[:6], ids[6] + 1, ids[7]]
    run(r, [("a", 3, 2)])
    steps.wait({"a": 5})
    while len(steps.pieces["a"]) < 3:
        steps.poll()
    with pytest.raises(
        ContractError, match=f"position 6 of 8 holds id {other[6]}, and the engine was fed {ids[6]}"
    ):
        steps.row("a", other, 2, 8)
    with pytest.raises(SurroundingsError, match="the states of 1 answers did not come in 0 s"):
        steps.wait({"b": 1}, stall_s=0.05)


def test_half_a_record_is_waited_for_and_rubbish_is_refused(runner, tmp_path):
    r = runner()
    r.add("a", *sequence(6, 5), VOCAB, "a")
    run(r, [("a", 0, 5)])
    steps = Steps.opened(tmp_path / "s")
    steps.wait({"a": 5})
    (path,) = (tmp_path / "s").glob("steps-*.log")
    whole = path.read_bytes()
    for cut in (3, 9, 40, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert steps.poll() == 0
    path.write_bytes(whole + whole)
    assert steps.poll() == len(whole)
    path.write_bytes(whole * 2 + b"rubbish that is long enough")
    with pytest.raises(ContractError, match="no record at byte"):
        steps.poll()


def test_files_go_when_all_their_rows_are_forgotten(tmp_path, monkeypatch):
    plugin, kind = fresh(), type("Here", (Runner,), {})
    monkeypatch.setattr(plugin, "FILE_BYTES", 600)
    plugin.patch(kind, LAYERS, str(tmp_path / "s"))
    r = kind(LAYERS, HIDDEN)
    for i in range(12):
        r.add(str(i), *sequence(i, 4), VOCAB, str(i))
        run(r, [(str(i), 0, 4)])
    steps = Steps.opened(tmp_path / "s")
    steps.wait({str(i): 4 for i in range(12)})
    files = sorted((tmp_path / "s").glob("steps-*.log"))
    assert len(files) > 3
    steps.forget([str(i) for i in range(6)])
    left = sorted((tmp_path / "s").glob("steps-*.log"))
    assert left and len(left) < len(files) and left == files[-len(left) :]
    assert steps.row("11", sequence(11, 4)[0], 1, 4).row_id == "11"
    steps.forget([str(i) for i in range(12)])
    assert sorted((tmp_path / "s").glob("steps-*.log")) == files[-1:]


def test_memory_is_bounded_and_a_step_waits_for_a_slow_disk(tmp_path, monkeypatch):
    """A disk that takes nothing until it is told: the third step must not be computed, and nothing is lost afterwards."""
    plugin, kind = fresh(), type("Here", (Runner,), {})
    opened, write = threading.Event(), plugin.os.write
    monkeypatch.setenv("EYAS_STATES_BUFFER", "1")  # two full steps
    plugin.patch(kind, LAYERS, str(tmp_path / "s"))
    r = kind(LAYERS, HIDDEN, tokens=8, requests=1)

    def slow(*args):
        opened.wait(30)
        return write(*args)

    monkeypatch.setattr(plugin, "os", SimpleNamespace(**{**vars(plugin.os), "write": slow}))
    done = []

    def work():
        for i in range(6):
            r.add(str(i), *sequence(i, 8), VOCAB, str(i))
            run(r, [(str(i), 0, 8)])
            done.append(i)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 5
    while len(done) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert 2 <= len(done) < 5 and thread.is_alive()
    opened.set()
    thread.join(30)
    steps = Steps.opened(tmp_path / "s")
    steps.wait({str(i): 8 for i in range(6)})
    for i in range(6):
        ids, aux, _, _ = sequence(i, 8)
        assert torch.equal(steps.row(str(i), ids, 2, 8).aux_TLD, aux.bfloat16())


def test_a_full_disk_ends_keeping_and_not_the_engine(runner, tmp_path, capfd):
    r = runner()
    r.add("a", *sequence(7, 5), VOCAB, "a")
    r.eyas.log.file = plugin_open("/dev/full")
    for _ in range(50):  # a failed writer still frees the buffer
        run(r, [("a", 0, 5)])
        time.sleep(0.002)
    steps = Steps(tmp_path / "s")
    deadline = time.monotonic() + 10
    while steps.ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(SurroundingsError, match="the engine has stopped keeping states"):
        steps.wait({"a": 5})
    assert "eyas-vllm: states are no longer kept: No space left on device" in capfd.readouterr().err


def plugin_open(path):
    import os

    return os.open(path, os.O_WRONLY)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 2**32))
def test_places_in_the_ring_never_overlap(sizes, seed):
    ring, rng, live = fresh().Ring(bytearray(100)), random.Random(seed), []
    for size in sizes:
        while ring.room(size) is None or (live and rng.random() < 0.3):
            ring.free()
            live.pop(0)
        place = ring.take(size)
        assert place >= 0 and place + size <= 100
        assert all(place + size <= a or b <= place for a, b in live)
        live.append((place, place + size))


def test_a_step_that_never_fits_is_an_error():
    with pytest.raises(RuntimeError, match="does not fit the buffer"):
        fresh().Ring(bytearray(100)).take(101)


@pytest.mark.parametrize("version", ["0.24.9", "0.33.0", "1.0.0"])
def test_versions_that_were_not_tried_are_refused_loudly(version):
    with pytest.raises(RuntimeError, match=f"tried with vLLM 0.25 to 0.32, and this is {version}"):
        fresh().refuse_untried(version)
    assert vllm.cannot_keep(vllm.Installed(Path("p"), version, "cuda", "PATH"), False)


@pytest.mark.parametrize("version", ["0.25.1", "0.32.0+cpu", "0.32.0"])
def test_versions_that_were_tried_pass(version):
    fresh().refuse_untried(version)
    assert vllm.cannot_keep(vllm.Installed(Path("p"), version, "cuda", "PATH"), False) is None


def test_eyas_and_the_plugin_name_the_same_versions():
    plugin = fresh()
    assert vllm.KEEPS == (plugin.OLDEST, plugin.NEWEST)
    about = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    (info,) = FOLDER.glob("*.dist-info")
    assert about["version"] == plugin.VERSION and info.name == f"eyas_vllm-{plugin.VERSION}.dist-info"
    assert f"Version: {plugin.VERSION}" in (info / "METADATA").read_text()
    (entry,) = about["entry-points"]["vllm.general_plugins"].items()
    assert f"{entry[0]} = {entry[1]}" in (info / "entry_points.txt").read_text()
    assert (vllm.PLUGIN / "eyas_vllm.py").is_file()


@pytest.mark.parametrize(
    "change, said",
    [
        (("cache_config", "enable_prefix_caching", True), "prefix caching"),
        (("parallel_config", "pipeline_parallel_size", 2), "pipeline parallelism"),
        (("parallel_config", "enable_dbo", True), "dual batch overlap"),
        ((None, "speculative_config", object()), "speculative decoding"),
    ],
)
def test_settings_with_which_rows_would_be_missing_are_refused(change, said):
    plugin, kind = fresh(), type("Here", (Runner,), {})
    section, name, value = change
    init = kind.__init__

    def other(self, *args):
        init(self, *args)
        setattr(getattr(self.vllm_config, section) if section else self.vllm_config, name, value)

    kind.__init__ = other
    plugin.patch(kind, LAYERS, "/nonexistent")
    with pytest.raises(RuntimeError, match=f"states cannot be kept with {said}"):
        kind(LAYERS, HIDDEN)


def test_a_rank_that_does_not_write_keeps_nothing(tmp_path):
    plugin, kind = fresh(), type("Here", (Runner,), {})
    plugin.writes = lambda: False
    plugin.patch(kind, LAYERS, str(tmp_path / "s"))
    r = kind(LAYERS, HIDDEN)
    r.add("a", *sequence(1, 4), VOCAB, "a")
    run(r, [("a", 0, 4)])
    assert r.use_aux_hidden_state_outputs and not (tmp_path / "s").exists()


def test_an_engine_without_aux_states_is_an_error(runner):
    r = runner()
    r.add("a", *sequence(1, 4), VOCAB, "a")
    r.input_batch.req_ids = ["a"]
    with pytest.raises(RuntimeError, match="the engine gave no aux states"):
        r.eyas.step(r, r.scheduled([("a", 0, 4)]))


def test_its_command_and_environment(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.setenv("PYTHONPATH", "/before")
    keep = vllm.Keep(Path("/run/steps"), (2, 5, 9), "bfloat16")
    s = vllm.Serving(Path("/m"), ("m", "n"), "h", 1, "float32", 64, keep=keep)
    found = vllm.environment(vllm.Installed(Path("/e/bin/python"), "0.32.0", "cuda", "PATH"), s)
    assert json.loads(found["EYAS_STATES_LAYERS"]) == [2, 5, 9] and found["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert found["VLLM_PLUGINS"] == "mine,eyas_states"
    assert found["PYTHONPATH"].split(":") == [str(vllm.PLUGIN), "/before"]
    words = vllm.command(vllm.Installed(Path("/e/bin/python"), "0.32.0", "cuda", "PATH"), s)
    assert "--no-enable-prefix-caching" in words
