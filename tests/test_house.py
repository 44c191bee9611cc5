"""How the house is built: imports go down, --help stays light, the command line is frozen."""

import ast
import subprocess
import sys
from pathlib import Path

import click
import pytest

from eyas.cli import eyas

SRC = Path(__file__).parents[1] / "src" / "eyas"
STAGES = {"plan", "generate", "extract", "train", "check", "bench", "verdict", "report"}
# From the bottom up: a module imports from its own layer's siblings or from below.
LAYERS = [
    {"errors", "progress"},
    {"interrupt", "feed"},
    {"target"},
    {"contract", "causes"},
    {"stores"},
    {"drafter"},
    {"engines"},
    {"schema"},
    {"recipe", "rundir", "profiles", "warm", "commandline"},
    {"servers"},
    {"fetch", *STAGES},
    {"pipeline", "convert"},
    {"outside", "upkeep"},
    {"cli"},
    {"__main__"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "eyas":
            parts = node.module.split(".")[1:]
            yield from [parts[0]] if parts else [a.name for a in node.names if a.name != "__version__"]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("eyas."))


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_only_go_down(path):
    mine = path.relative_to(SRC).parts[0].removesuffix(".py")
    if mine == "__init__":
        return
    for other in imports(path):
        assert other == mine or RANK[other] <= RANK[mine], f"{mine} imports {other}, which is above it"
        assert not (mine in STAGES and other in STAGES and other != mine), (
            f"stage {mine} imports stage {other}"
        )


def test_help_loads_no_heavy_library():
    code = (
        "import sys; from eyas.cli import eyas; eyas.main(['--help'], standalone_mode=False); "
        "heavy = {'torch', 'transformers', 'pyarrow', 'pydantic', 'numpy', 'matplotlib', 'yaml', 'jinja2'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "plan, generate, extract" in done.stdout or "whole life" in done.stdout


COMMON = ["--json", "--run", "--set", "recipe"]
FROZEN = {
    "run": [*COMMON, "--from", "--until"],
    **{name: COMMON for name in ("extract", "train", "verdict", "report")},
    "generate": [*COMMON, "--show"],
    "plan": [*COMMON, "--profile"],
    "bench": [*COMMON, "--url", "--baseline"],
    "check": [*COMMON, "--target", "--engine", "--engine-version", "--fix", "--probe", "--on", "--url"],
    "convert": ["source", "out", "--to", "--engine-version", "--target", "--json"],
    "fetch": ["name", "--models", "--json"],
    "status": COMMON,
    "clean": ["recipe", "--run", "--yes", "--json"],
    "serve": [*COMMON, "--baseline", "--dry-run", "--port", "--timeout"],
    "ps": ["--json"],
    "stop": ["name", "--json"],
    "engine": {"setup": ["name", "--python", "--json"]},
    "init": ["--target", "--from-command", "--name", "--out", "--json"],
    "recipe": {"show": COMMON},
}


def words(command: click.Command):
    if isinstance(command, click.Group):
        return {name: words(sub) for name, sub in command.commands.items()}
    return sorted(p.opts[0] for p in command.params)


def test_the_command_line_is_frozen():
    expected = {
        n: {k: sorted(v) for k, v in w.items()} if isinstance(w, dict) else sorted(w)
        for n, w in FROZEN.items()
    }
    assert words(eyas) == expected


def test_every_verb_and_option_says_what_it_does():
    def missing(command, name):
        if isinstance(command, click.Group):
            return [m for n, sub in command.commands.items() for m in missing(sub, f"{name} {n}")]
        silent = [p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.help]
        return [name] * (not command.help) + [f"{name} {s}" for s in silent]

    assert missing(eyas, "eyas") == []


def test_every_rule_of_check_has_its_section():
    """The ids that findings carry, and the sections of docs/checks.md that they point to."""
    ids, kinds = set(), {"Finding", "error", "warning", "unknown", "info"}
    for path in (SRC / "check").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds
            if named and isinstance(node.args[0], ast.Constant):
                ids.add(node.args[0].value)
    text = (SRC.parents[1] / "docs" / "checks.md").read_text(encoding="utf-8")
    sections = {line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")}
    assert ids == sections
