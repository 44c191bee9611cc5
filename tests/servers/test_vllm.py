"""What engines/vllm.py knows: where vLLM is found, its command line, its environment."""

import json
import sys
from pathlib import Path

import pytest

from eyas.contract import Norms
from eyas.engines import vllm, vllm_loader
from eyas.engines.vllm import Installed, Serving
from eyas.errors import SurroundingsError, UsageError
from eyas.servers import metrics
from tests.conftest import contract

SERVING = Serving(
    Path("/m"), ("m", "eyas-0"), "127.0.0.1", 8000, "float32", 8192, Path("/d"), 3, args=("--seed", "1")
)
CPU = Installed(Path("/e/bin/python"), "0.32.0", "cpu", "PATH")


def test_it_is_found_where_the_recipe_says_then_where_the_environment_says(fake_vllm, monkeypatch):
    found = vllm.find(fake_vllm)
    assert found == Installed(Path(fake_vllm), "0.32.0", "cuda", "engine.python")
    monkeypatch.setenv("EYAS_VLLM_PYTHON", fake_vllm)
    assert vllm.find(None).origin == "EYAS_VLLM_PYTHON"


def test_a_python_without_it_is_named_and_without_any_the_way_to_one_is_told(fake_vllm, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SurroundingsError, match="engine.python is .* no vLLM in it"):
        vllm.find(sys.executable)
    with pytest.raises(SurroundingsError, match="engine.python is /no/python"):
        vllm.find("/no/python")
    with pytest.raises(SurroundingsError, match="eyas engine setup vllm"):
        vllm.find(None)


def test_versions_that_were_not_tried_are_said_to_be_untested():
    assert vllm.untested("0.32.0") is None
    assert "0.19.0 is untested" in vllm.untested("0.19.0")


def test_the_command_on_a_cpu():
    words = vllm.command(CPU, SERVING)
    assert words == [
        "/e/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "8000", "--model", "/m",
        "--served-model-name", "m", "eyas-0", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
        "--max-num-seqs", "16", "--speculative-config",
        json.dumps({"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}), "--seed", "1",
    ]  # fmt: skip


def test_the_command_on_a_gpu():
    import dataclasses

    plain = dataclasses.replace(SERVING, drafter=None, args=(), contained=True)
    words = vllm.command(CPU._replace(device="cuda"), plain)
    assert words[0] == "/e/bin/python"
    assert "--enforce-eager" not in words and "--speculative-config" not in words


def test_the_environment_preloads_what_is_there(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    found = vllm.environment(CPU._replace(python=tmp_path / "bin" / "python"), SERVING)
    assert (
        str(tmp_path / "lib" / "libiomp5.so") in found["LD_PRELOAD"]
        and found["VLLM_CPU_KVCACHE_SPACE"] == "2"
    )
    assert "LD_PRELOAD" not in vllm.environment(CPU._replace(device="cuda"), SERVING)
    import dataclasses

    mine = dataclasses.replace(SERVING, env={"VLLM_CPU_KVCACHE_SPACE": "9"})
    assert vllm.environment(CPU, mine)["VLLM_CPU_KVCACHE_SPACE"] == "9"


def test_counters_are_summed_over_engines_and_read_by_position():
    text = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 10.0
vllm:generation_tokens_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_total{engine="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 1e+01
"""
    found = metrics.parse(text, vllm.COUNTERS)
    assert found.generated == 15 and found.drafts == 4 and found.accepted_at == {0: 4.0, 1: 10.0}
    assert found.since(found).generated == 0 and found.since(found).accepted_at == {0: 0.0, 1: 0.0}
    assert metrics.parse("some_other_total 3.0\n", vllm.COUNTERS) is None


@pytest.mark.parametrize(
    ("version", "norms", "words"),
    [
        (
            "0.18.1",
            {"fc": "chunks", "output": True},
            "fc_norm.0.weight is not a tensor that it knows.*fed to the next draft step hidden, trained with normed; norm of the aux",
        ),
        (
            "0.18.1",
            {"fc": "chunks", "output": False},
            "norm of the aux states before fc none, trained with chunks",
        ),
        ("0.17.0", {"fc": "chunks", "output": False}, None),  # was not read
        ("0.18.1", {"fc": "whole", "output": False}, None),
        ("0.20.0", {"fc": "chunks", "output": True}, None),  # between two that were read and differ: unknown
        ("0.22.1", {"fc": "chunks", "output": True}, None),
        ("0.33.0.dev3", {"fc": "chunks", "output": True}, None),
    ],
)
def test_a_version_that_does_not_read_the_drafters_norms_is_refused(version, norms, words):
    drafted = contract(norms=Norms(before_residual=False, **norms))
    if words is None:
        return vllm_loader.refuse(version, drafted)
    with pytest.raises(UsageError, match=words):
        vllm_loader.refuse(version, drafted)
    return None


def test_versions_that_were_only_read_or_not_even_that_are_told_apart():
    assert "was read, not launched" in vllm.untested("0.22.1") and "untested" in vllm.untested("0.31.0")
