"""Is it still the same model? Greedy answers with the drafter against those without, and answers that need more than text.

greedy     equal to the plain answer, or first different where the target's two best are nearly level (a near tie)
sampled    as likely under the target as what it samples itself at the same temperature
schema     an answer bound to a JSON schema     tool     a forced tool call     long     a prompt that fills the context
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eyas.bench.load import Ask, Place
from eyas.bench.measure import Request, first_difference
from eyas.causes import NEAR_TIE
from eyas.drafter.replay import bootstrap
from eyas.errors import EyasError
from eyas.progress import say
from eyas.servers import client
from eyas.servers.client import CHAT, COMPLETIONS, Client

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}},
    "required": ["city"],
    "additionalProperties": False,
}
TYPES = {"string": str, "integer": int}
TOKENS = 120  # of a structured answer
LONG_TOKENS = 24
SURPRISE = 0.3  # nats a token by which sampled answers may differ in the mean: three times what some ten prompts scatter


class Outcome(NamedTuple):
    """right, wrong, or refused by the server, with its words; of the long prompt also what was read and answered."""

    kind: str
    detail: str = ""
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    text: str | None = None


def gap(place: Place, ids: list[int]) -> float | None:
    """Log-probability of the best next token minus that of the second, as the server computes it; None where it says none."""
    body = {"model": place.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": 2}
    try:
        choice = _ask(place, COMPLETIONS, body)["choices"][0]
        best = sorted((choice["logprobs"]["top_logprobs"][0] or {}).values(), reverse=True)
        return float(best[0] - best[1])
    except (EyasError, KeyError, IndexError, TypeError):
        return None


def judge(place: Place, prompt: list[int], plain: Sequence[int], other: Sequence[int]) -> str:
    at = first_difference(plain, other)
    if at is None:
        return "equal"
    between = gap(place, [*prompt, *plain[:at]])
    return "unjudged" if between is None else "near_tie" if between < NEAR_TIE else "fault"


def compare(
    place: Place,
    prompts: dict[str, list[int]],
    plain: Sequence[Request],
    again: Sequence[Request],
    drafted: Sequence[Request],
) -> tuple[dict[str, int], dict[int, dict[str, int]]]:
    """Counts of outcomes: of the plain answers against themselves (a rerun), and of each k against the plain ones.

    A prompt whose plain answers differ between runs away from a near tie is left out of the second: nothing can be said of it.
    """
    base = {r.prompt: r.ids for r in reversed(plain)}
    rerun = {r.prompt: judge(place, prompts[r.prompt], base[r.prompt], r.ids) for r in again}
    moody = {p for p, kind in rerun.items() if kind == "fault"}
    out: dict[int, Counter[str]] = {}
    for r in drafted:
        kind = "unstable" if r.prompt in moody else judge(place, prompts[r.prompt], base[r.prompt], r.ids)
        out.setdefault(r.k, Counter(equal=0, near_tie=0, fault=0))[kind] += 1
    return dict(Counter(rerun.values())), {k: dict(v) for k, v in out.items()}


def surprise(place: Place, prompt: list[int], answer: Sequence[int]) -> float | None:
    """Mean -log p of an answer's tokens under the target, as a plain server computes it, in nats; None where it says none."""
    body = {
        "model": place.model, "prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
    }  # fmt: skip
    try:
        known = _ask(place, COMPLETIONS, body)["choices"][0]["prompt_logprobs"][len(prompt) :]
        found = [entry[str(t)]["logprob"] for t, entry in zip(answer, known, strict=True)]
        return -float(sum(found)) / len(found)
    except (EyasError, KeyError, IndexError, TypeError, ValueError):
        return None


def unlikely(own: Sequence[float], drafted: Sequence[float], confidence: float) -> str | None:
    """Why sampled answers cannot be the target's, or None. own, drafted: surprise of the answers to the same prompts, sampled
    without and with the drafter at one temperature. A drafter must not change their distribution, so neither its mean."""
    more = np.array(drafted) - np.array(own)
    gap = bootstrap(len(more), lambda w: float((w * more).sum() / w.sum()), confidence)
    if gap.low <= SURPRISE:
        return None
    return (
        f"a token surprises the target by {np.mean(drafted):.2f} nats, and by {np.mean(own):.2f} without the drafter "
        f"({gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}])"
    )


def probes(place: Place, long_prompt: Ask) -> dict[str, Outcome]:
    """What a server makes of a schema, a tool and a long prompt."""
    return {"schema": _schema(place), "tool": _tool(place), "long": _long(place, long_prompt)}


def _schema(place: Place) -> Outcome:
    question = "Invent a person. Answer in JSON with the keys name and age."
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {"response_format": shape, **_greedy(place, question)}
    try:
        message = _ask(place, CHAT, body)["choices"][0]["message"]
    except EyasError as e:  # also a 500: session.py asks afterwards whether the server still answers
        return Outcome("refused", str(e))
    return _fits(message.get("content") or "", PERSON)


def _tool(place: Place) -> Outcome:
    # strict: without it vLLM 0.32 binds a forced call to its format alone, and the arguments are what the model likes
    function = {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": PLACE,
        "strict": True,
    }
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    try:
        message = _ask(place, CHAT, body | _greedy(place, "What is the weather in Paris?"))["choices"][0][
            "message"
        ]
    except EyasError as e:  # also a 500: session.py asks afterwards whether the server still answers
        return Outcome("refused", str(e))
    calls = message.get("tool_calls") or []
    if not calls or calls[0]["function"]["name"] != "get_weather":
        return Outcome("wrong", f"no call of the tool: {json.dumps(message)[:200]}")
    return _fits(calls[0]["function"]["arguments"], PLACE)


def _long(place: Place, ask: Ask) -> Outcome:
    """The ids of the answer are kept for compare_long."""
    path, body = ask.request(place, max_tokens=LONG_TOKENS, temperature=0.0)

    async def work() -> client.Reply:
        async with Client(place.url) as asking:
            return await asking.whole(path, body)

    try:
        reply = client.run(work())
    except EyasError as e:  # also a 500: session.py asks afterwards whether the server still answers
        return Outcome("refused", str(e))
    prompt = reply.prompt_ids or ask.prompt_ids or []
    return Outcome(
        "right" if reply.tokens else "wrong",
        f"{len(prompt):,} prompt tokens",
        prompt,
        reply.ids or [],
        reply.text,
    )


def compare_long(place: Place, plain: dict[str, Any], drafted: dict[str, Any]) -> Outcome:
    """The answers to the long prompt of the plain server and a drafting one, as their probes kept them."""
    theirs, mine = plain["long"], drafted["long"]
    for side, found in (("without", theirs), ("with", mine)):
        if found["kind"] != "right":
            return Outcome(found["kind"], f"{side} the drafter: {found['detail']}")
    if not theirs["ids"] or not mine["ids"]:
        return Outcome("right" if theirs["text"] == mine["text"] else "wrong", "compared as text")
    kind = judge(place, mine["prompt_ids"], theirs["ids"], mine["ids"])
    right = kind in ("equal", "near_tie")
    return Outcome("right" if right else "wrong", f"{mine['detail']}: {kind.replace('_', ' ')}")


def _greedy(place: Place, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": place.model, "messages": messages, "temperature": 0.0, "max_tokens": TOKENS}


def _ask(place: Place, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with Client(place.url) as asking:
            return await asking.ask(path, body)

    return client.run(work())


def _fits(text: str, schema: dict[str, Any]) -> Outcome:
    try:
        value = json.loads(text)
    except ValueError:
        return Outcome("wrong", f"not JSON: {text[:120]!r}")
    properties = schema["properties"]
    good = (
        isinstance(value, dict)
        and set(value) == set(properties)
        and all(isinstance(value[n], TYPES[p["type"]]) for n, p in properties.items())
    )
    return Outcome("right" if good else "wrong", text[:120])


def show(k: int, found: dict[str, Outcome]) -> None:
    """One line: what was right, and the words of what was not."""
    parts = [
        f"{name} {o.kind}" + ("" if o.kind == "right" else f" ({o.detail[:160]})")
        for name, o in found.items()
    ]
    say(f"  {f'k={k}' if k else 'baseline'}: {', '.join(parts)}")
