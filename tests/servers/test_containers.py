"""engine.command: a container gets our variables and a name, and is removed by it. The runtime here is a script that starts what
follows the image, away from its client as a runtime does, and knows it by its name."""

import json
import stat
import sys
from pathlib import Path

import pytest

from eyas.engines import containers, vllm
from eyas.errors import SurroundingsError, UsageError
from eyas.servers import records, serve
from tests.servers.test_serve import opened

RUNTIME = """#!{python}
import os, signal, subprocess, sys
words, state = sys.argv[1:], "{state}"
if words[0] == "rm":
    try:
        pid = int(open(os.path.join(state, words[2])).read())
        os.remove(os.path.join(state, words[2]))
        os.killpg(pid, signal.SIGKILL)
    except (OSError, ValueError):
        sys.exit(1)
    sys.exit(0)
assert words[0] == "run", words
env, name, at = {{"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}}, None, 1
while words[at] != "IMAGE":
    if words[at] == "-e":
        key, _, value = words[at + 1].partition("=")
        env[key] = value
        at += 1
    elif words[at] == "--name":
        name = words[at + 1]
        at += 1
    at += 1
inner = subprocess.Popen(words[at + 1 :], env=env, start_new_session=True)
if name:
    open(os.path.join(state, name), "w").write(str(inner.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a client that does not pass it on
sys.exit(inner.wait())
"""
RUN = ("run", "--rm", "--network", "host", "IMAGE")


@pytest.fixture
def docker(tmp_path):
    (tmp_path / "state").mkdir()
    path = tmp_path / "docker"
    path.write_text(RUNTIME.format(python=sys.executable, state=tmp_path / "state"))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_runtime_is_known_by_its_program():
    assert containers.runtime(["sudo", "/usr/bin/podman", "--log-level", "error", "run", "--rm", "i"]) == [
        "sudo", "/usr/bin/podman", "--log-level", "error",
    ]  # fmt: skip
    assert containers.runtime(["numactl", "-N", "0"]) is None and containers.runtime([]) is None


def test_the_container_gets_variables_and_a_name():
    words = containers.inside(["docker", *RUN], {"A": "1 2"}, "eyas-0")
    assert words == ["docker", "run", "--name", "eyas-0", "-e", "A=1 2", *RUN[1:]]
    assert containers.inside(["nice", "-n", "5"], {"A": "1"}, "eyas-0") == ["nice", "-n", "5"]


@pytest.mark.parametrize(
    "words, said",
    [
        (("docker", "run", "--name", "mine", "--network=host", "i"), "leave --name out"),
        (("docker", "run", "-d", "--network=host", "i"), "leave -d out"),
        (("podman", "run", "i"), "add --network host"),
    ],
)
def test_what_would_escape_us_is_refused(words, said):
    with pytest.raises(UsageError, match=said):
        containers.inside(words, {}, "eyas-0")


def test_the_version_is_asked_inside(docker, fake_vllm):
    found = vllm.find(fake_vllm, [docker, *RUN])
    assert (found.version, found.origin) == ("0.32.0", "engine.command")
    with pytest.raises(SurroundingsError, match=r"engine.command: .*/no/python does not start a Python"):
        vllm.find("/no/python", [docker, *RUN])


def test_it_is_stopped_though_its_client_is_deaf(docker, finished, fake_vllm, decoy):
    command = f"engine.command={json.dumps([docker, *RUN])}"
    record = serve.serve(*opened(finished, fake_vllm, command), baseline=False, port=None, ready_s=60)
    names = Path(docker).parent / "state"
    inner = int((names / record.nonce).read_text())
    assert inner in [p.pid for p in records.members(record)]
    assert records.stop(record, grace_s=0.5) == 2 and records.members(record) == []
    assert not (names / record.nonce).exists()
