"""Token ids read by a server as prompts, so that the states of every position are kept (plugins/eyas-vllm)."""

from eyas.servers import client
from eyas.servers.client import COMPLETIONS, Client

ROW = "eyas_row"  # of vllm_xargs: the name under which the plugin keeps a request's states


def tag(row: str) -> dict[str, dict[str, str]]:
    """What a request's body carries so that its states are kept under this name."""
    return {"vllm_xargs": {ROW: row}}


def read(url: str, model: str, named: list[tuple[str, list[int]]], concurrency: int = 16) -> None:
    """Let a server read rows of ids, at most `concurrency` at once. Raises RequestError where it refuses one."""
    bodies = [
        {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, **tag(name)}
        for name, ids in named
    ]

    async def work() -> None:
        async with Client(url) as asking:
            await client.gather(asking.whole, COMPLETIONS, bodies, concurrency)

    client.run(work())
