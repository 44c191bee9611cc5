"""How a target is served now, from the command line or systemd unit that serves it: what a recipe's engine section needs of it.

eyas init --from-command '/opt/vllm/bin/vllm serve /models/kimi --tensor-parallel-size 8 --trust-remote-code'
eyas init --from-command /etc/systemd/system/kimi.service
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from eyas.errors import UsageError
from eyas.schema import OURS

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
DROPPED = OURS | {"--api-key": "a key is never written to a file"}
FLAGS = {"--disable-log-stats"}  # dropped, and without a value
SHELL = re.compile(r"^(\d*[<>].*|&|&&|;|\||\|\|)$")
DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}
ASSIGNED = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)


class Served(NamedTuple):
    """model: a folder, or a name on a hub. notes: what was left out, and why."""

    model: str | None
    python: str | None
    args: list[str]
    env: dict[str, str]
    dtype: str
    remote_code: bool
    notes: list[str]


def read(said: str) -> Served:
    """A command line, or the path of a file that holds one. Raises UsageError for what starts no vLLM."""
    path = Path(said)
    text, env, notes = said, dict[str, str](), list[str]()
    if "\n" not in said and len(said) < 4096 and path.is_file():
        text, env, notes = _unit(path)
    try:
        words = shlex.split(_one_line(text, notes))
    except ValueError as e:
        raise UsageError(f"--from-command: {e}: {text[:200]}") from e
    while words and (words[0] in ("env", "exec", "nohup", "sudo") or ASSIGNED.match(words[0])):
        word = words.pop(0)
        if found := ASSIGNED.match(word):
            env[found[1]] = found[2]
    if words and Path(words[0]).name in ("docker", "podman", "nerdctl"):
        raise UsageError(
            "--from-command: this starts a container. Give the server's own words (vllm serve …), and put the words that start the "
            "container into engine.command of the recipe."
        )
    end = next((i for i, word in enumerate(words) if SHELL.match(word)), len(words))
    if words[end:]:
        notes.append(f"{' '.join(words[end:])} is the shell's, and left out")
    notes += [f"{word} is not expanded: write what it stands for" for word in words[:end] if "$" in word]
    python, rest = _server(words[:end], text)
    return _arguments(python, rest, _kept(env, notes), notes)


def _one_line(text: str, notes: list[str]) -> str:
    """The line that serves; comments and other lines are left out, the latter with a note."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    serving = [line for line in lines if "vllm" in line]
    if len(serving) > 1:
        raise UsageError(f"--from-command: {len(serving)} lines name vllm: give the one that serves")
    if not serving:
        return " ".join(lines)
    notes += [f"the line {line[:60]!r} is not read" for line in lines if line is not serving[0]]
    return serving[0]


def _unit(path: Path) -> tuple[str, dict[str, str], list[str]]:
    """A systemd unit's command and environment; any other file is a command line."""
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--from-command: {path} cannot be read: {e}") from e
    starts = re.findall(r"^ExecStart\s*=\s*[-@:+!]*(.*)$", text, re.MULTILINE)
    if not starts:
        return text, {}, []
    if len(starts) > 1:
        raise UsageError(
            f"--from-command: {path} has {len(starts)} ExecStart lines: give the one that serves as a command line"
        )
    env = dict[str, str]()
    for line in re.findall(r"^Environment\s*=\s*(.*)$", text, re.MULTILINE):
        for word in shlex.split(line):
            if found := ASSIGNED.match(word):
                env[found[1]] = found[2]
    files = re.findall(r"^EnvironmentFile\s*=\s*(.*)$", text, re.MULTILINE)
    return (
        starts[0],
        env,
        [f"{f.strip()} is not read: put what the server needs of it into engine.env" for f in files],
    )


def _kept(env: dict[str, str], notes: list[str]) -> dict[str, str]:
    secret = [name for name in env if SECRET.search(name)]
    notes += [
        f"{name} is left out: set it in eyas's own environment, which servers inherit" for name in secret
    ]
    return {name: value for name, value in env.items() if name not in secret}


def _server(words: list[str], text: str) -> tuple[str | None, list[str]]:
    """The Python that serves, where the command says which, and the server's arguments."""
    first = words[0] if words else ""
    name = Path(first).name
    if name == "vllm" and words[1:2] == ["serve"]:
        beside = str(Path(first).parent / "python") if "/" in first else None
        return beside, words[2:]
    if re.fullmatch(r"python[0-9.]*", name) and words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
        return (first if "/" in first else None), words[3:]
    raise UsageError(
        "--from-command: this starts no vLLM that eyas knows (vllm serve …, or python -m vllm.entrypoints.openai.api_server …): "
        f"{' '.join(text.split())[:200]}"
    )


def _arguments(python: str | None, words: list[str], env: dict[str, str], notes: list[str]) -> Served:
    model = words.pop(0) if words and not words[0].startswith("-") else None
    args: list[str] = []
    dtype, remote = "auto", False
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        name = "--" + key[2:].replace("_", "-") if key.startswith("--") else key
        if name == "--trust-remote-code":
            remote = True
            continue
        ours = DROPPED.get(name.partition(".")[0])
        if ours is None:
            args.append(word)
            continue
        if not equals and name not in FLAGS:
            if not words:
                raise UsageError(f"--from-command: {word} has no value")
            value = words.pop(0)
            while name == "--served-model-name" and words and not words[0].startswith("-"):
                words.pop(0)
        if name == "--model":
            model = value
        elif name == "--dtype":
            dtype = DTYPES.get(value, "auto")
            if value not in DTYPES:
                notes.append(f"--dtype {value} is left out: eyas knows {', '.join(DTYPES)}")
        else:
            notes.append(f"{name} is left out: {ours}")
    return Served(model, python, args, env, dtype, remote, notes)
