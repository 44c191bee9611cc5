"""What a server needs of this machine, looked at before it is started: memory, GPU memory, shared memory, disk for its log."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from eyas.errors import SurroundingsError, UsageError
from eyas.progress import size

SHARED_MEMORY_BYTES = 64 * 2**20
LOG_BYTES = 64 * 2**20
DEFAULT_GPU_SHARE = 0.9  # vLLM's own default of --gpu-memory-utilization
PROGRAM_BYTES = 2 * 10**9  # Python, PyTorch and two or three processes of a CPU server


class Gpu(NamedTuple):
    number: int
    total_mib: int
    used_mib: int
    holders: list[str]  # "pid 12: 3400 MiB"


def memory_need(weight_bytes: int, cache_bytes: int) -> int:
    """Bytes that a server on a CPU takes."""
    return weight_bytes + cache_bytes + PROGRAM_BYTES


def refuse_small_memory(weight_bytes: int, cache_bytes: int) -> None:
    """Raises SurroundingsError where weights, cache and program do not fit into this machine's memory."""
    need, free = memory_need(weight_bytes, cache_bytes), psutil.virtual_memory().available
    if need > free:
        raise SurroundingsError(
            f"the server needs some {size(need)} (weights {size(weight_bytes)}, key/value cache {size(cache_bytes)}, the program "
            f"{size(PROGRAM_BYTES)}), and {size(free)} are free. Stop other work, or lower the cache in engine.env."
        )


def refuse_full_disks(log: Path) -> None:
    """Raises SurroundingsError where /dev/shm or the log's disk is nearly full."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for place, need, why in (
        ("/dev/shm", SHARED_MEMORY_BYTES, "its processes talk there"),
        (str(log.parent), LOG_BYTES, "its log"),
    ):
        if Path(place).is_dir() and (free := shutil.disk_usage(place).free) < need:
            raise SurroundingsError(
                f"{place} has {size(free)} free, and the server needs {size(need)} ({why})."
            )


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi sees, with who holds their memory; none where there is no nvidia-smi."""
    cards = _smi("--query-gpu=index,uuid,memory.total,memory.used")
    holders = _smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [
        Gpu(
            int(number),
            int(float(total)),
            int(float(used)),
            [f"process {pid}: {mib} MiB" for uuid_, pid, mib in holders if uuid_ == uuid],
        )
        for number, uuid, total, used in cards
    ]


def _smi(query: str) -> list[list[str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


def refuse_taken_gpus(cards: Sequence[Gpu], args: Sequence[str]) -> None:
    """Raises SurroundingsError where a GPU has less free memory than the share that the server will ask for."""
    wanted = share(args)
    for card in cards:
        free = card.total_mib - card.used_mib
        if free < wanted * card.total_mib:
            fits = max(0.0, free / card.total_mib - 0.01)
            raise SurroundingsError(
                f"GPU {card.number}: {free:,} of {card.total_mib:,} MiB are free, and the server asks for {wanted:.0%} "
                f"({'; '.join(card.holders) or 'held by processes that nvidia-smi does not name'}). "
                f"Free it, or set engine.args to [--gpu-memory-utilization, '{fits:.2f}'], which would fit."
            )


def share(args: Sequence[str]) -> float:
    """The share of a GPU's memory that a server asks for."""
    for i, word in enumerate(args):
        name, _, value = word.partition("=")
        if name == "--gpu-memory-utilization":
            return number("engine.args: --gpu-memory-utilization", value or "".join(args[i + 1 : i + 2]))
    return DEFAULT_GPU_SHARE


def number(what: str, text: str) -> float:
    """Raises UsageError where a setting that must be a positive number is not one."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{what} is {text!r}; it must be a positive number")
    return value
