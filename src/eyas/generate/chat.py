"""The target's chat template: prompts as ids, thoughts apart from answers, and answers as ids where a server gives only text.

    <|im_start|>user⏎2+2?<|im_end|>⏎<|im_start|>assistant⏎ | <think>⏎easy⏎</think>⏎⏎4<|im_end|> | ⏎
                       prompt                              |   completion, all supervised       | left out

A row's prompt is what the template renders before the answer, and its completion all that the target writes, its thoughts and the end of
turn included. Both are found by ids: the prompt is a prefix of the whole, and the completion ends with the last stop id. Earlier turns'
thoughts stand in a prompt only where the template renders them, and are never supervised.
"""

import json
import re
from typing import Any, NamedTuple

from jinja2 import TemplateError

from eyas.target import Decision

Messages = list[dict[str, Any]]
MARKS = (  # what opens and closes a thought
    ("<think>", "</think>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)


class NotSpelled(Exception):
    """The template cannot say this."""


class Thought(NamedTuple):
    """An answer's text: the thought (None: there is none), and the rest."""

    thought: str | None
    content: str


class Chat:
    """A template with its options (generate.template: enable_thinking and the like)."""

    def __init__(self, tokenizer: Any, stop_ids: tuple[int, ...], options: dict[str, Any]) -> None:
        self.tokenizer, self.stop_ids, self.options = tokenizer, set(stop_ids), options
        written = tokenizer.chat_template
        text = written if isinstance(written, str) else " ".join((written or {}).values())
        self.marks = next((pair for pair in MARKS if pair[1] in text), None)
        self.tail = self._tail() if self.marks else ""
        known = tokenizer.get_added_vocab()
        self.closes_id: int | None = known.get(self.marks[1]) if self.marks else None

    def _tail(self) -> str:
        """What the template writes before an answer, as far as it concerns thoughts."""
        try:
            text = self._render([{"role": "user", "content": "?"}], None, True, tokenize=False)
        except NotSpelled:
            return ""
        return str(text).rsplit("?", 1)[-1].rstrip()

    @property
    def opened(self) -> bool:
        """Whether the prompt itself opens the thought, so that an answer begins inside it."""
        return bool(self.marks) and self.tail.endswith(self.marks[0] if self.marks else "")

    def thinks(self, wanted: bool | str) -> Decision:
        """Whether answers should hold thoughts. wanted: generate.thinking."""
        if wanted != "auto":
            return Decision(wanted, "the recipe says so (generate.thinking)")
        if not self.marks:
            return Decision(False, "its chat template has no mark of a thought")
        if self.marks[1] in self.tail:
            return Decision(False, f"its template writes {self.marks[1]} before the answer")
        if self.opened:
            return Decision(True, f"its template writes {self.marks[0]} before the answer")
        return Decision(True, f"its template knows {self.marks[1]}")

    def prompt(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids up to where the target begins to write. Raises NotSpelled where the template refuses the messages."""
        return list(self._render(messages, tools, True))

    def _render(
        self, messages: Messages, tools: list[dict[str, Any]] | None, begins: bool, tokenize: bool = True
    ) -> Any:
        try:
            out = self.tokenizer.apply_chat_template(
                _with_objects(messages), tools=tools, add_generation_prompt=begins, tokenize=tokenize, return_dict=tokenize, **self.options,
            )  # fmt: skip
        except (TemplateError, ValueError, TypeError) as e:
            raise NotSpelled(f"the chat template refuses it: {e}") from e
        return out["input_ids"] if tokenize else out

    def answer(
        self, messages: Messages, message: dict[str, Any], tools: list[dict[str, Any]] | None = None, ended: bool = True,
    ) -> list[int]:  # fmt: skip
        """The ids of an assistant message after these messages, with its end of turn if it ended: how the target would have written it.

        Raises NotSpelled where the template renders the message otherwise in a history than the target writes it.
        """
        before = self.prompt(messages, tools)
        whole = list(self._render([*messages, message], tools, False))
        ids = whole[self._begins(before, whole) :]
        ends = [i for i, t in enumerate(ids) if t in self.stop_ids]
        if not ends:
            raise NotSpelled("the template writes no end of turn after an answer")
        thought = str(message.get("reasoning_content") or "").strip()
        if thought and thought not in self.tokenizer.decode(ids, skip_special_tokens=False):
            if not (self.opened and ids[0] == self.closes_id):
                raise NotSpelled("the template leaves an answer's thought out")
            own = list(self.tokenizer(thought, add_special_tokens=False)["input_ids"])
            ids, ends = own + ids, [len(own) + i for i in ends]
        return ids[: ends[-1] + ended]

    def _begins(self, before: list[int], whole: list[int]) -> int:
        """Where an answer begins in what the template renders. A history may close a thought at once where the prompt opens it."""
        if whole[: len(before)] == before:
            return len(before)
        opens_id = self.tokenizer.get_added_vocab().get(self.marks[0]) if self.marks else None
        if self.opened and opens_id in before:
            at = len(before) - 1 - before[::-1].index(opens_id)
            if whole[:at] == before[:at] and whole[at : at + 1] == [self.closes_id]:
                return at
        raise NotSpelled(
            "the template does not go on from its own prompt when it renders an answer, so an answer's ids cannot be told"
        )

    def split(self, text: str) -> Thought:
        """An answer's text, special tokens and all, as thought and content; a thought that was cut has no content."""
        if not self.marks:
            return Thought(None, self.clean(text))
        opens, closes = self.marks
        before, closed, after = text.partition(closes)
        if not closed:
            if self.opened or opens in text:
                return Thought(self.clean(before.partition(opens)[2] if opens in before else before), "")
            return Thought(None, self.clean(text))
        thought = before.partition(opens)[2] if opens in before else before
        return Thought(self.clean(thought), self.clean(after))

    def clean(self, text: str) -> str:
        """Without special tokens, nor space around."""
        special = "|".join(re.escape(t) for t in self.tokenizer.all_special_tokens)
        return re.sub(special, "", text).strip() if special else text.strip()


def _with_objects(messages: Messages) -> Messages:
    """The arguments of calls as objects: OpenAI's form has them as text, which servers read before they render."""
    return [
        m | {"tool_calls": [_with_object(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except ValueError:
        return call
    return call | {"function": function | {"arguments": read}}
