"""What a server must show before anything of it is kept: that it is the target, that it answers at all, that it thinks as the target does."""

from typing import Any

from eyas.errors import ContractError, RequestError, UsageError
from eyas.generate.chat import Chat
from eyas.generate.conversing import Answered, Job, Sink
from eyas.generate.prompts import Quarantined

TRIAL = 16  # answers, by which a server is judged


class Trial:
    """The first answers of a server, held back until they show that it is the target, that it answers at all, and that it thinks as the
    target does; then a sink like any."""

    def __init__(self, url: str, chat: Chat, thinking: bool | str, sink: Sink) -> None:
        self.url, self.chat, self.thinking, self.sink, self.done = url, chat, thinking, sink, False
        self.held: list[tuple[Job, Answered, list[dict[str, Any]]]] = []
        self.lost: list[tuple[Quarantined, int]] = []

    def row(self, job: Job, answered: Answered, results: list[dict[str, Any]]) -> None:
        if self.done:
            self.sink.row(job, answered, results)
            return
        self.held.append((job, answered, results))
        if len(self.held) == TRIAL:
            self.end()

    def refused(self, lost: Quarantined, turns: int, error: RequestError) -> None:
        """Raises the error where a server refuses everything."""
        if self.done:
            self.sink.refused(lost, turns)
            return
        self.lost.append((lost, turns))
        if len(self.lost) == TRIAL and not self.held:
            raise error

    def end(self) -> None:
        """Judge, and let go what was held back."""
        if self.done:
            return
        if self.lost and not self.held:
            raise RequestError(self.lost[0][0].reason)
        if self.held:
            self._same_prompts()
            self._thinks()
        self.done = True
        for lost, turns in self.lost:
            self.sink.refused(lost, turns)
        for job, answered, results in self.held:
            self.sink.row(job, answered, results)
        self.held, self.lost = [], []

    def _same_prompts(self) -> None:
        """Not one prompt read as our tokenizer and template write it means another model or another template."""
        said = [(j, a) for j, a, _ in self.held if a.source == "ids"]
        if said and not any(j.ids == a.prompt_ids for j, a in said):
            job, answered = said[0]
            raise ContractError(
                f"{self.url} reads none of our prompts as the target's tokenizer and template write them (ours begins "
                f"{job.ids[:8]}, theirs {answered.prompt_ids[:8]}): it serves another model, or with another chat template."
            )
        spelled = [(j, a) for j, a, _ in self.held if a.said.text and a.source == "ids"]
        wrong = [a for _, a in spelled if "spell" in a.flag]
        if spelled and len(wrong) == len(spelled):
            raise ContractError(
                f"{self.url}: the ids of its answers do not spell their texts in any of {len(spelled)} ({wrong[0].ids[:8]} for "
                f"{wrong[0].said.text[:40]!r}): its tokenizer is not the target's."
            )
        lost = [a for _, a, _ in self.held if a.source == "text"]
        if lost and all(a.flag for a in lost) and len(lost) == len(self.held):
            raise UsageError(
                f"{self.url} returns no token ids (return_token_ids, which vLLM answers since 0.10.2), and none of {len(lost)} answers "
                f"can be told from its text: {lost[0].flag}. Use a server that returns ids, or leave engine.url out and let eyas start one; "
                "generate.retokenised: keep trains on texts tokenised again all the same."
            )

    def _thinks(self) -> None:
        wanted = self.chat.thinks(self.thinking)
        if (
            wanted.value
            and len(self.held) >= TRIAL / 2
            and not any(a.said.reasoning or self._cut(a) for _, a, _ in self.held)
        ):
            raise UsageError(
                f"the target should think ({wanted.reason}), and none of {len(self.held)} answers of {self.url} holds a thought: a drafter "
                "would never see what it writes most. Is the server's reasoning parser right, is thinking turned off there (generate.template)? "
                "If this target does not think, set generate.thinking: false."
            )

    def _cut(self, answered: Answered) -> bool:
        """An answer that ended inside a thought which its prompt had opened: its text is the thought."""
        return self.chat.opened and answered.finish_reason == "length"
