"""States kept while a server generates: the plugin's own code in a fake vLLM that answers with the tiny target."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from eyas import pipeline
from eyas.engines import vllm
from eyas.engines.vllm import Installed
from eyas.errors import ContractError, SurroundingsError, UsageError
from eyas.servers import connector, records
from eyas.stores import conversations, states

SERVED = ("engine.name=vllm", "engine.env={FAKE_REAL: '1'}")


def run(finished, python, folder, *sets, last="extract", first=None):
    words = (*SERVED, f"engine.python={python}", *sets)
    return pipeline.run(str(finished[0]), words, str(folder), last=last, first=first)


def stored(folder):
    shards = json.loads((folder / "states" / "manifest.json").read_text())["content"]
    return {r.row_id: r.load() for r in states.refs(folder / "states", shards)}


@pytest.fixture(scope="module")
def kept(finished, tmp_path_factory):
    """A run in which generate kept the states, and its manifests."""
    return tmp_path_factory.mktemp("kept") / "run"


def test_states_of_one_pass_are_those_of_the_embedded_engine(finished, fake_vllm, tmp_path):
    """Two chunks, then token by token, some twice: the rows are those of one pass over the stored ids, but for the last."""
    made = run(finished, fake_vllm, tmp_path / "run")
    assert made["extract"]["with"] == "generate" and made["extract"]["checks"]["greedy_agreement"] == 1.0
    checks = made["extract"]["checks"]
    assert checks["head_agreement"] == 1.0 and checks["positions"] > 100
    assert (
        checks["disk_differs"] == checks["greedy_near_ties"] == 0
    )  # named, though there are none: the report shows them
    assert set(checks) >= {"decoded_against_prefilled", "together_against_alone", "against_embedded"}
    assert (
        max(checks["against_embedded"]["relative_error"].values()) < 0.01
    )  # aux states are rounded to bfloat16
    assert not (tmp_path / "run" / "conversations" / "states").exists()
    assert not (tmp_path / "run" / "conversations" / "steps").exists()
    one = stored(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "states")
    again = run(finished, fake_vllm, tmp_path / "run", "extract.with=pass")
    assert again["extract"]["with"] == "pass" and again["extract"]["checks"]["greedy_agreement"] == 1.0
    two = stored(tmp_path / "run")
    assert one.keys() == two.keys()
    for name, a in one.items():
        b = two[name]
        assert a.ids_T.tolist() == b.ids_T.tolist() and a.start == b.start
        assert torch.allclose(a.aux_TLD[:-1].float(), b.aux_TLD[:-1].float(), atol=0.02, rtol=0.02)
        assert torch.allclose(a.last_SD[:-1], b.last_SD[:-1], atol=1e-4)
        assert a.top1_T[a.start : -1].tolist() == b.top1_T[b.start : -1].tolist()
        assert not a.last_SD[-1].any() and int(a.top1_T[-1]) == -1
    assert records.every() == []


def test_what_the_last_position_holds_changes_nothing(finished, fake_vllm, tmp_path):
    """The engine never reads an answer's last token, so its states are zeros; training and replay must not read them either."""
    run(finished, fake_vllm, tmp_path / "a", "train.epochs=1", last="train")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("train", "drafter"):
        shutil.rmtree(tmp_path / "b" / name)
    manifest = json.loads((tmp_path / "b" / "states" / "manifest.json").read_text())
    for shard in manifest["content"]:
        path = tmp_path / "b" / "states" / shard["file"]
        rows = [r.load() for r in states.rows_of(path)]
        for r in rows:
            r.aux_TLD[-1], r.last_SD[-1], r.top1_T[-1] = 1000.0, -1000.0, 3
        states.write_shard(path, rows, {})
        shard["sha256"] = states.hashed(path)
    (tmp_path / "b" / "states" / "manifest.json").write_text(json.dumps(manifest))
    run(finished, fake_vllm, tmp_path / "b", "train.epochs=1", last="train")
    a, b = ((tmp_path / f / "drafter" / "best" / "model.safetensors").read_bytes() for f in ("a", "b"))
    assert a == b
    a, b = (json.loads((tmp_path / f / "drafter" / "best" / "metrics.json").read_text()) for f in ("a", "b"))
    assert a["tau"] == b["tau"]


@pytest.mark.parametrize(
    "kind, said",
    [
        ("moved states", "fit best one position|mean cosine"),
        ("other ids", "position 0 of .* holds id .* and the engine was fed 5"),
    ],
)
def test_states_that_are_others_are_refused(finished, fake_vllm, tmp_path, kind, said):
    with pytest.raises(ContractError, match=said):
        run(finished, fake_vllm, tmp_path / "run", f"engine.env={{FAKE_REAL: '1', FAKE: {kind}}}")
    assert records.every() == []


def test_a_disk_that_fails_in_the_middle_keeps_what_was_finished(finished, fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.generate.stage.WAVES", 1)
    broken = "engine.env={FAKE_REAL: '1', FAKE: full disk, FAKE_AFTER: '24'}", "generate.concurrency=1"
    with pytest.raises(SurroundingsError, match="stopped keeping states.*same command again"):
        run(finished, fake_vllm, tmp_path / "run", *broken, last="generate")
    parts = sorted((tmp_path / "run" / "conversations").glob("part-*.parquet"))
    assert parts and all(conversations.read_part(p) for p in parts)
    before = {p.name: p.read_bytes() for p in parts}
    made = run(finished, fake_vllm, tmp_path / "run")
    assert made["extract"]["with"] == "generate"
    assert {p.name: (tmp_path / "run" / "conversations" / p.name).read_bytes() for p in parts} == before
    assert len(stored(tmp_path / "run")) == sum(made["generate"]["rows"].values())


def test_what_was_kept_of_other_layers_is_not_taken(finished, fake_vllm, tmp_path, capsys):
    run(finished, fake_vllm, tmp_path / "run", last="generate")
    made = run(finished, fake_vllm, tmp_path / "run", "target.aux_layers=[0, 1]")
    assert made["extract"]["with"] == "pass" and made["extract"]["aux_layers"] == [0, 1]
    assert (
        "reads the stored ids once more: those that were kept have aux_layers [0, 1, 2]"
        in capsys.readouterr().err
    )
    with pytest.raises(UsageError, match="extract.with is generate, and none were kept"):
        run(
            finished,
            fake_vllm,
            tmp_path / "run",
            "target.aux_layers=[0, 1]",
            "extract.with=generate",
            first="extract",
        )


def test_layers_that_change_while_generate_is_unfinished_are_not_mixed(
    finished, fake_vllm, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("eyas.generate.stage.WAVES", 1)
    broken = "engine.env={FAKE_REAL: '1', FAKE: full disk, FAKE_AFTER: '24'}", "generate.concurrency=1"
    with pytest.raises(SurroundingsError):
        run(finished, fake_vllm, tmp_path / "run", *broken, last="generate")
    assert list((tmp_path / "run" / "conversations" / "states").glob("part-00000-*"))
    made = run(finished, fake_vllm, tmp_path / "run", "target.aux_layers=[0, 2]")
    assert "parts were answered without keeping states" in capsys.readouterr().err
    assert made["extract"]["with"] == "pass" and made["extract"]["aux_layers"] == [0, 2]
    assert made["extract"]["checks"]["against_embedded"]["shifts"]["0"] > 0.999


def test_a_version_that_nothing_can_read_with_is_said(finished, fake_vllm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm, "KEEPS", ((0, 25), (0, 31)))
    monkeypatch.setattr(vllm, "CONNECTOR_SINCE", (0, 40))
    made = run(finished, fake_vllm, tmp_path / "run")
    assert made["extract"]["with"] == "pass"
    said = capsys.readouterr().err
    assert "not kept while generating: vLLM 0.32.0 is outside 0.25 to 0.31" in said
    assert "the embedded engine reads the stored ids" in said and "vLLM 0.32.0 is older than 0.40" in said
    with pytest.raises(UsageError, match="states cannot be kept: vLLM 0.32.0 is outside"):
        run(finished, fake_vllm, tmp_path / "r2", "extract.with=generate")


@pytest.fixture
def newer_vllm(fake_vllm, tmp_path):
    """The fake, of a version that the plugin was not tried with."""
    (tmp_path / "fake" / "vllm-0.32.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.40.0\n"
    )
    return fake_vllm


def test_outside_the_plugin_s_range_vllm_s_own_connector_reads(finished, newer_vllm, tmp_path, capsys):
    made = run(finished, newer_vllm, tmp_path / "run")["extract"]
    assert "extract_hidden_states" in made["reason"] and "0.40.0" in made["reason"]
    assert made["with"] == "pass" and made["reason"] in capsys.readouterr().err
    assert made["checks"]["head_agreement"] == made["checks"]["greedy_agreement"] == 1.0
    assert max(made["checks"]["against_embedded"]["relative_error"].values()) < 0.01
    rows = {r.row_id: r.ids for r in conversations.read(tmp_path / "run" / "conversations")}
    found = stored(tmp_path / "run")
    assert {name: r.ids_T.tolist() for name, r in found.items()} == rows
    assert not (tmp_path / "run" / "states" / "steps").exists()


def test_the_connector_s_other_ids_are_refused(finished, newer_vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "other ids")
    with pytest.raises(ContractError, match="silently wrong"):
        run(finished, newer_vllm, tmp_path / "run")


def test_a_connector_that_writes_nothing_is_an_error_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(connector, "WHOLE_S", 0.2)
    with pytest.raises(SurroundingsError, match=r"x\.safetensors.*server's log"):
        connector._whole(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")  # half of a header
    with pytest.raises(SurroundingsError, match="disk is full"):
        connector._whole(tmp_path / "x.safetensors")


@pytest.mark.parametrize("said", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"x": 1}}])
def test_a_server_without_the_connector_is_named(said):
    with pytest.raises(SurroundingsError, match="hidden_states_path"):
        connector._name(said)


def test_where_neither_can_be_the_reason_names_both():
    old = Installed(Path("p"), "0.17.0", "cuda", "PATH")
    assert vllm.cannot_connect(old, False, False) == "vLLM 0.17.0 is older than 0.18"
    new = old._replace(version="0.40.0")
    assert vllm.cannot_connect(new, False, False) is None
    assert "MLA" in vllm.cannot_connect(new, False, True)
    assert "container" in vllm.cannot_connect(new, True, False)
    assert "GPU" in vllm.cannot_connect(new._replace(device="cpu"), False, False)
