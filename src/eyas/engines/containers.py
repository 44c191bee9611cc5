"""A container runtime's command line around a server's: what must be added so that the server inside is as known and as easily
stopped as one outside.

`docker run` gives the container neither our environment nor our process group, and a client that is killed leaves it running.
So the variables go in with -e, and the container gets a name by which it is removed.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import UsageError

RUNTIMES = ("docker", "podman", "nerdctl")
REMOVE_S = 60.0


def runtime(wrapper: Sequence[str]) -> list[str] | None:
    """The words before `run` of a runtime's command (sudo docker), or None where there is no such command."""
    for at, word in enumerate(wrapper):
        if Path(word).name in RUNTIMES and "run" in wrapper[at:]:
            return list(wrapper[: list(wrapper).index("run", at)])
    return None


def inside(wrapper: Sequence[str], env: dict[str, str], name: str) -> list[str]:
    """The wrapper with these variables and this container's name; any other program's command line as it is.

    Raises UsageError where it names the container or sends it away (--detach) itself, or keeps the network apart.
    """
    before = runtime(wrapper)
    if before is None:
        return list(wrapper)
    after = wrapper[len(before) + 1 :]
    for word in after:
        if word.partition("=")[0] in ("--name", "--detach", "-d"):
            raise UsageError(
                f"engine.command: leave {word} out: eyas names the container and waits for it, to be sure to stop it"
            )
    words = " ".join(after)
    if not any(f"{flag}{between}host" in words for flag in ("--network", "--net") for between in ("=", " ")):
        raise UsageError(
            "engine.command: add --network host: the server listens on loopback, where eyas asks it, and the model's folder and "
            "the run's must be mounted under their own paths (-v /models:/models)"
        )
    settings = [word for key, value in env.items() for word in ("-e", f"{key}={value}")]
    return [*before, "run", "--name", name, *settings, *after]


def remove(command: Sequence[str], name: str) -> None:
    """Stop and delete the container of a server's command, if it has one and it is still there."""
    before = runtime(command)
    if before is not None and name in command:
        try:
            subprocess.run([*before, "rm", "-f", name], capture_output=True, timeout=REMOVE_S)
        except (OSError, subprocess.TimeoutExpired):
            return  # the runtime is gone, and what it ran with it
