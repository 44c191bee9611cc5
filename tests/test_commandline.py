"""A recipe's engine section out of the command line, or the systemd unit, that serves the target now."""

import pytest
import yaml
from click.testing import CliRunner

from eyas import commandline, recipe
from eyas.cli import eyas
from eyas.errors import UsageError
from tests.conftest import save_target

STORY = (
    "VLLM_USE_V1=1 HF_TOKEN=hf_abc /opt/vllm/bin/vllm serve /models/kimi --tensor-parallel-size 8 --trust-remote-code "
    "--max-model-len=32768 --gpu-memory-utilization 0.92 --tool-call-parser kimi_k2 --enable-auto-tool-choice "
    "--reasoning-parser kimi_k2 --host 0.0.0.0 --port 8000 --served-model-name kimi kimi-k2.5 --api-key sk-1 "
    """--speculative-config '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}'"""
)


def test_what_eyas_does_not_set_itself_is_kept_word_for_word():
    found = commandline.read(STORY)
    assert found.model == "/models/kimi" and found.python == "/opt/vllm/bin/python"
    assert found.args == [
        "--tensor-parallel-size", "8", "--max-model-len=32768", "--gpu-memory-utilization", "0.92", "--tool-call-parser", "kimi_k2",
        "--enable-auto-tool-choice", "--reasoning-parser", "kimi_k2",
    ]  # fmt: skip
    assert found.remote_code and found.dtype == "auto" and found.env == {"VLLM_USE_V1": "1"}
    said = "\n".join(found.notes)
    assert "hf_abc" not in said and "sk-1" not in said
    for name in ("HF_TOKEN", "--host", "--port", "--served-model-name", "--api-key", "--speculative-config"):
        assert f"{name} is left out" in said


def test_a_unit_with_its_environment(tmp_path):
    unit = tmp_path / "kimi.service"
    unit.write_text(
        '[Service]\nEnvironment=A=1 "B=two words"\nEnvironment=API_KEY=x\nEnvironmentFile=-/etc/kimi\n'
        "ExecStart=-/usr/bin/python3.12 -m vllm.entrypoints.openai.api_server \\\n  --model /m --dtype bfloat16 \\\n  --seed 3\n"
    )
    found = commandline.read(str(unit))
    assert found.model == "/m" and found.python == "/usr/bin/python3.12" and found.args == ["--seed", "3"]
    assert found.env == {"A": "1", "B": "two words"} and found.dtype == "bfloat16"
    assert any("API_KEY" in n for n in found.notes) and any("/etc/kimi is not read" in n for n in found.notes)


def test_what_is_the_shells_is_no_argument(tmp_path):
    path = tmp_path / "serve.sh"
    path.write_text(
        "#!/bin/sh\n# it serves\nset -e\nnohup vllm serve m#1 \\\n  --max-model-len $LENGTH --seed 3 > log 2>&1 &\n"
    )
    found = commandline.read(str(path))
    assert found.model == "m#1" and found.args == ["--max-model-len", "$LENGTH", "--seed", "3"]
    said = "\n".join(found.notes)
    assert (
        "'set -e' is not read" in said
        and "> log 2>&1 & is the shell's" in said
        and "$LENGTH is not expanded" in said
    )
    with pytest.raises(UsageError, match="2 lines name vllm"):
        commandline.read("vllm serve a\nvllm serve b")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "starts no vLLM"),
        ("python -m sglang.launch_server --model-path m", "starts no vLLM"),
        ("docker run --gpus all vllm/vllm-openai --model m", "engine.command"),
        ("vllm serve m --port", "--port has no value"),
        ("vllm serve 'm", "No closing quotation"),
        ("vllm bench serve", "starts no vLLM"),
    ],
)
def test_what_starts_no_vllm_is_refused(said, why):
    with pytest.raises(UsageError, match=why):
        commandline.read(said)


def test_a_unit_that_starts_twice_is_refused(tmp_path):
    (tmp_path / "u").write_text("ExecStart=vllm serve a\nExecStart=vllm serve b\n")
    with pytest.raises(UsageError, match="2 ExecStart"):
        commandline.read(str(tmp_path / "u"))


def test_init_writes_a_recipe_that_serves_the_same(tmp_path):
    target = save_target(tmp_path / "deep", layers=8)
    out = tmp_path / "r.yaml"
    said = (
        f"env X=1 vllm serve {target} --dtype half --trust_remote_code --max-num-seqs 4 --disable-log-stats"
    )
    done = CliRunner().invoke(eyas, ["init", "--from-command", said, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "--dtype half is left out" in done.stderr and "--disable-log-stats is left out" in done.stderr
    body = yaml.safe_load(out.read_text())
    assert body["engine"]["name"] == "vllm" and body["engine"]["args"] == ["--max-num-seqs", "4"]
    assert body["engine"]["env"] == {"X": "1"} and body["target"]["trust_remote_code"] is True
    assert body["target"]["model"] == str(target)
    recipe.read(out)


def test_init_says_what_is_missing(tmp_path):
    done = CliRunner().invoke(eyas, ["init", "--from-command", "vllm serve org/model"])
    assert done.exit_code == 2 and "org/model, which is no folder here" in done.output
    done = CliRunner().invoke(eyas, ["init"])
    assert done.exit_code == 2 and "give --target DIR" in done.output
