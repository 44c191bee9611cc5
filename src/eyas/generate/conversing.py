"""One conversation as it goes on: user turns from the prompt, answers from the target, results of the tools that it calls.

    next() -> Job, Quarantined, or None at the end        take(answer, results)        after an answer, what comes next

Every assistant turn becomes one row, whose prompt is the history as the target's template renders it. A call is answered by the result that
the prompt recorded for the same function and arguments, or by the recipe's function (generate.tools); where there is none the conversation
ends with the call, which is kept.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from eyas.errors import UsageError
from eyas.generate.chat import Chat, NotSpelled
from eyas.generate.prompts import Prompt, Quarantined, canonical
from eyas.recipe import Resolved
from eyas.rundir import fingerprint
from eyas.schema import GenerateSection

ROUNDS = 16  # of calls in one user turn
Function = Callable[[str, dict[str, Any]], str]


@dataclass(frozen=True)
class Job:
    """One assistant turn to be answered."""

    row_id: str
    prompt: Prompt
    turn: int  # of the assistant, from 0
    sample: int
    messages: list[dict[str, Any]]
    ids: list[int]
    temperature: float
    top_p: float
    tools: list[dict[str, Any]] | None = None

    @property
    def split(self) -> str:
        return "held_out" if self.prompt.held_out else "train"


@dataclass(frozen=True)
class Said:
    """What the target said in a turn, as it goes into the history. finish_reason: "stop", "length" or "tool_calls"."""

    text: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = self.calls
        return out


class Stored(NamedTuple):
    """What a row that is there said, and what the tools answered."""

    said: Said
    results: list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What all conversations of a run have in common."""

    resolved: Resolved
    chat: Chat
    longest: int  # tokens of prompt and answer together
    function: Function | None

    @property
    def options(self) -> GenerateSection:
        return self.resolved.recipe.generate

    def sampling(self, prompt: Prompt) -> tuple[float, float]:
        return (0.0, 1.0) if prompt.held_out else (self.options.temperature, self.options.top_p)

    def row_id(self, prompt: Prompt, turn: int, sample: int) -> str:
        """Hash of prompt, sampling, target, turn and sample number."""
        key: list[Any] = [
            prompt.system, prompt.turns, turn, sample, self.sampling(prompt), self.options.max_tokens,
        ]  # fmt: skip
        more = {
            "role": prompt.role if prompt.role != "system" else None,
            "tools": prompt.tools,
            "results": prompt.results,
            "template": self.options.template,
            "side": prompt.held_out
            and self.sampling(prompt) == (self.options.temperature, self.options.top_p),
        }
        if more := {k: v for k, v in more.items() if v}:
            key.append(more)
        return fingerprint([key, self.resolved.target.fingerprint, self.resolved.dtype])


class Conversation:
    """A prompt on its way, once for each sample."""

    def __init__(self, prompt: Prompt, sample: int, setting: Setting) -> None:
        self.prompt, self.sample, self.setting = prompt, sample, setting
        self.messages: list[dict[str, Any]] = []
        if prompt.system is not None:
            self.messages.append({"role": prompt.role, "content": prompt.system})
        self.tools = json.loads(prompt.tools) if prompt.tools else None
        self.user = self.turn = self.rounds = 0
        self.over = False
        self.unanswered = ""  # the call that nothing answers
        self._user()

    def _user(self) -> None:
        if self.user == len(self.prompt.turns):
            self.over = True
        else:
            self.messages.append({"role": "user", "content": self.prompt.turns[self.user]})
            self.user, self.rounds = self.user + 1, 0

    def next(self) -> Job | Quarantined | None:
        """The turn to be answered; why there is none though the prompt goes on; or None."""
        if self.over:
            return None
        try:
            ids = self.setting.chat.prompt(self.messages, self.tools)
        except NotSpelled as e:
            return self.end(str(e))
        if len(ids) + self.setting.options.max_tokens > self.setting.longest:
            return self.end(
                f"{len(ids)} prompt tokens + {self.setting.options.max_tokens} exceed the context of {self.setting.longest}"
            )
        return Job(
            self.setting.row_id(self.prompt, self.turn, self.sample), self.prompt, self.turn, self.sample,
            list(self.messages), ids, *self.setting.sampling(self.prompt), self.tools,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """User turns that have no answer."""
        return len(self.prompt.turns) - self.user + 1

    def end(self, why: str) -> Quarantined:
        """No more turns, and why."""
        self.over = True
        return Quarantined(self.prompt.prompt_id, f"turn {self.turn + 1}: {why}")

    def results(self, said: Said) -> list[dict[str, Any]]:
        """What the tools answer to its calls, as messages; fewer than calls where one has no answer."""
        out: list[dict[str, Any]] = []
        if self.rounds == ROUNDS:
            return out
        for call in said.calls:
            called = call.get("function") or {}
            name = str(called.get("name"))
            content = self._result(name, called.get("arguments") or "{}")
            if content is None:
                self.unanswered = name
                break
            out.append(
                {"role": "tool", "tool_call_id": str(call.get("id", "")), "name": name, "content": content}
            )
        return out

    def _result(self, name: str, arguments: Any) -> str | None:
        wanted = (name, canonical(arguments))
        known = next((content for n, a, content in self.prompt.results if (n, a) == wanted), None)
        if known is not None or self.setting.function is None:
            return known
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return "error: the arguments are not JSON"
        return self.setting.function(name, given)

    def take(self, said: Said, results: list[dict[str, Any]]) -> Quarantined | None:
        """Go on after an answer; returns why later turns are lost, where they are."""
        self.messages.append(said.message)
        self.turn += 1
        if said.calls:
            self.rounds += 1
            if len(results) < len(said.calls):
                self.over = True
            self.messages += results
            return None
        self._user()
        if not self.over and not said.text and not said.reasoning:
            return self.end("the answer before it is empty")
        return None


class Answered(NamedTuple):
    prompt_ids: list[int]
    ids: list[int]
    finish_reason: str  # "stop", "length" or "tool_calls"
    said: Said
    source: str = "ids"
    flag: str = ""  # why the row is left out


class Sink(Protocol):
    """Where answers go, and what is there already."""

    def known(self, conversation: Conversation, job: Job) -> Stored | None: ...

    def row(self, job: Job, answered: Answered, results: list[dict[str, Any]]) -> None: ...

    def flush(self) -> None: ...

    def refused(self, lost: Quarantined, turns: int) -> None: ...

    def unanswered(self, job: Job, call: str) -> None: ...


def function_of(word: str | None) -> Function | None:
    """The function that a recipe names as FILE.py:NAME. Raises UsageError where there is none."""
    if word is None:
        return None
    path, _, name = word.rpartition(":")
    spec = importlib.util.spec_from_file_location("eyas_tools", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise UsageError(
            f'generate.tools: {word} is no function: expected FILE.py:NAME, and "{path}" is no Python file'
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f'generate.tools: {path} has no function "{name}"')

    def call(called: str, arguments: dict[str, Any]) -> str:
        try:
            out = function(called, arguments)
        except Exception as e:  # it is the user's, and a tool that fails is something that a target meets
            return f"error: {e}"
        return out if isinstance(out, str) else json.dumps(out, ensure_ascii=False)

    return call
