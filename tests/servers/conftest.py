"""A vLLM that misbehaves on purpose: a package of that name whose server answers, dies, hangs or lies, as FAKE says."""

import socket
import subprocess
import sys
import time

import pytest

from eyas.servers import records

SERVER = """
import argparse, json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--host"); parser.add_argument("--port", type=int); parser.add_argument("--served-model-name", nargs="+")
a, _ = parser.parse_known_args()
kind = os.environ.get("FAKE", "ok")
print("INFO Starting to load model x", flush=True)
if kind == "dies":
    print("ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", flush=True)
    sys.exit(1)
if kind == "mumbles":
    print("something nobody has seen before", flush=True)
    sys.exit(3)
if kind == "silent":
    time.sleep(600)
if kind == "stubborn":  # a worker that ignores SIGTERM, as a hung one does
    subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
if kind == "titled":
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={})
names = ["another"] if kind == "stranger" else a.served_model_name

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": n} for n in names]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass

print("INFO Application startup complete", flush=True)
ThreadingHTTPServer((a.host, a.port), Handler).serve_forever()
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """engine.python that has a fake vLLM 0.32.0, and a state folder of its own."""
    root = tmp_path / "fake"
    package = root / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
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
