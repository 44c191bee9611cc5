"""A vLLM that misbehaves on purpose: a package of that name whose server answers, dies, hangs or lies, as FAKE says."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.servers import launch, records


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """engine.python that has a fake vLLM 0.32.0, and a state folder of its own."""
    root = tmp_path / "fake"
    package = root / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_server.py"), package / "api_server.py")
    shutil.copy(Path(__file__).with_name("fake_runner.py"), package.parent.parent)
    info = root / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("EYAS_VLLM_PYTHON", raising=False)
    yield sys.executable
    for record in records.every():
        records.stop(record, grace_s=0.2)


@pytest.fixture
def decoy():
    """A server of somebody else, which must survive whatever eyas stops."""
    process = subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield process
    assert process.poll() is None, "somebody else's process was stopped"
    process.kill()
    process.wait()


@pytest.fixture
def running(fake_vllm, tmp_path):
    """Starts fake servers that are nobody's, and returns their addresses: running(k=3, FAKE="crawls")."""
    started = []

    def start(k=0, name="m", **env):
        port = launch.free_port("127.0.0.1")
        drafting = (
            ["--speculative-config", json.dumps({"num_speculative_tokens": k, "model": "x"})] if k else []
        )
        words = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        started.append(
            subprocess.Popen(
                [sys.executable, *words, "--served-model-name", name, *drafting],
                env={**os.environ, **env},
                stdout=subprocess.DEVNULL,
            )
        )
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: launch.answers(url), 30)
        return url

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def taken_port():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen()
    return s, s.getsockname()[1]
