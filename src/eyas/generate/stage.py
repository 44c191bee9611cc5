"""generate: prompts -> conversations, answered by the target itself, as exact token ids.

Reads the recipe's prompt sources and the target. Writes conversations/part-*.parquet, quarantine.jsonl and manifest.json. Training answers are
sampled, held-out ones greedy, since acceptance is replayed on them.

    eyas generate RECIPE [--show N]
"""

import json
import time
from typing import Any

from eyas.errors import UsageError
from eyas.generate import prompts as prompt_files
from eyas.generate import selfprompt
from eyas.generate.answering import Answering, Server, answering
from eyas.generate.chat import Chat
from eyas.generate.conversing import Answered, Conversation, Job, Setting, Stored, function_of
from eyas.generate.keeping import Keeper
from eyas.generate.parts import Parts
from eyas.generate.prompts import Mixture, Prompt, Quarantined
from eyas.progress import Progress, say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, file_hash, write_text
from eyas.stores import conversations
from eyas.stores.conversations import Row
from eyas.stores.truth import Figures

WAVES = 4  # a server's part holds this many times generate.concurrency rows
AGREEMENT_ROWS = 8  # greedy answers that the target reads once more


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Answer every prompt; returns the manifest. Rows that are there already are kept."""
    mixture = prompt_files.read(resolved.recipe.prompts)
    function = function_of(resolved.recipe.generate.tools)
    tokenizer = resolved.target.tokenizer(resolved.recipe.target.trust_remote_code)
    chat = Chat(tokenizer, resolved.target.stop_ids, resolved.recipe.generate.template)
    with answering(resolved, rundir, chat) as engine:
        setting = Setting(resolved, chat, engine.longest, function)
        return _run(setting, rundir, engine, mixture)


def _run(setting: Setting, rundir: RunDir, engine: Answering, mixture: Mixture) -> dict[str, Any]:
    resolved, folder = setting.resolved, rundir / "conversations"
    written, dropped = _self_prompts(engine, setting, rundir)
    prompts = [*mixture.prompts, *written]
    prompt_files.need_both_sides(prompts, resolved.recipe.prompts.held_out)
    wanted = _wanted(prompts, setting)
    keeper = Keeper(resolved, rundir, engine) if isinstance(engine, Server) and engine.steps else None
    rows_each = resolved.recipe.generate.concurrency * WAVES
    total = sum(len(prompt.turns) for prompt, _ in wanted)
    began = time.perf_counter()
    with (
        Progress("generate", total, "answers", "tokens") as progress,
        Parts(folder, rows_each, keeper) as parts,
    ):
        sink = _Sink(parts, progress, mixture.left_out, resolved.target.fingerprint)
        engine.converse((Conversation(prompt, sample, setting) for prompt, sample in wanted), sink)
        seconds = time.perf_counter() - began
    if not parts.visited:
        first = mixture.left_out[-1]
        raise UsageError(f"prompts: none can be answered; the first: {first.where}: {first.reason}")
    if dropped_rows := parts.finish():
        say(f"  {dropped_rows:,} rows of prompts that the recipe no longer has were dropped")
    if keeper:
        keeper.finish([conversations.number(p) for p in conversations.parts(folder)])
    figures = _figures(folder, engine)
    _say_what_was_left_out(sink, folder, engine, figures)
    body = figures.body() | {
        "content": {p.name: file_hash(p) for p in conversations.parts(folder)},
        "quarantined": len(sink.bad),
        "unanswered_calls": sink.calls,
        "on_policy": _agreement(folder, engine),
        "prompts": mixture.about,
        "self_prompts_dropped": dropped,
        "engine": engine.engine,
        "rates": {"completion_tokens_per_s": sink.made / seconds if sink.made else None},
    }
    return rundir.finish("generate", body)


def _wanted(prompts: list[Prompt], setting: Setting) -> list[tuple[Prompt, int]]:
    """Each prompt with the numbers of its samples; prompts that are the same to the target only once."""
    out: dict[str, tuple[Prompt, int]] = {}
    for prompt in prompts:
        for sample in range(1 if prompt.held_out else setting.options.samples):
            out.setdefault(setting.row_id(prompt, 0, sample), (prompt, sample))
    return list(out.values())


class _Sink:
    """Answers as rows, and what was left out."""

    def __init__(self, parts: Parts, progress: Progress, bad: list[Quarantined], target: str) -> None:
        self.parts, self.progress, self.bad, self.target = parts, progress, bad, target
        self.made = self.calls = 0

    def known(self, conversation: Conversation, job: Job) -> Stored | None:
        more = len(job.prompt.turns) > 1 or bool(job.tools)
        found = self.parts.visit(job.row_id, history=more)
        if found:
            self.progress.done += 1
            self.progress.first += 1
        return found

    def row(self, job: Job, answered: Answered, results: list[dict[str, Any]]) -> None:
        said = answered.said
        self.parts.add(
            Row(
                row_id=job.row_id,
                prompt_id=job.prompt.prompt_id,
                prompt_key=prompt_files.prompt_key(job.prompt.turns[0]),
                domain=job.prompt.domain,
                split=job.split,
                turn=job.turn,
                sample=job.sample,
                prompt_ids=answered.prompt_ids,
                completion_ids=answered.ids,
                finish_reason=answered.finish_reason,
                temperature=job.temperature,
                top_p=job.top_p,
                target=self.target,
                text=said.text,
                reasoning=said.reasoning,
                calls=json.dumps(said.calls, ensure_ascii=False) if said.calls else "",
                results=json.dumps(results, ensure_ascii=False) if results else "",
                tools=job.prompt.tools,
                otherwise=int(job.ids != answered.prompt_ids),
                source=answered.source,
                flag=answered.flag or _unsupervised(answered),
            )
        )
        self.made += len(answered.ids)
        self.progress.total = max(self.progress.total, self.progress.done + 1)
        self.progress.add(1, len(answered.ids))

    def flush(self) -> None:
        self.parts.flush()

    def refused(self, lost: Quarantined, turns: int) -> None:
        self.bad.append(lost)
        self.progress.total -= turns

    def unanswered(self, job: Job, call: str) -> None:
        """A call that neither the prompt nor the recipe's function answers: the conversation ends there."""
        self.calls += 1
        self.bad.append(
            Quarantined(
                job.prompt.prompt_id,
                f'turn {job.turn + 1}: its call of "{call}" has no result; later turns are not asked',
            )
        )


def _unsupervised(answered: Answered) -> str:
    """A row that would teach nothing, or all of it: a mask that went wrong."""
    if not answered.ids:
        return "no token of it is supervised"
    return "" if answered.prompt_ids else "all of its tokens are supervised"


def _self_prompts(engine: Answering, setting: Setting, rundir: RunDir) -> tuple[list[Prompt], dict[str, int]]:
    """The user turns that the recipe asks the target to write, those that overlap keep_out left out."""
    resolved = setting.resolved
    section = resolved.recipe.prompts
    count = sum(s.self_ or 0 for s in section.sources)
    if not count:
        return [], {}
    batch = resolved.recipe.generate.concurrency
    key = f"{resolved.target.fingerprint} {resolved.dtype}"
    written, dropped = selfprompt.write(
        engine, setting.chat.tokenizer, rundir / "conversations", count, batch, section.held_out, key
    )
    guarded = prompt_files.KeepOut.read(section.keep_out)
    kept = [p for p in written if not guarded.overlap(p.turns)]
    return kept, dropped | {"kept out": len(written) - len(kept)}


def _figures(folder: Any, engine: Answering) -> Figures:
    figures = Figures(engine.stop_ids)
    for path in conversations.parts(folder):
        for row in conversations.read_part(path):
            figures.add(row)
    return figures


def _say_what_was_left_out(sink: _Sink, folder: Any, engine: Answering, figures: Figures) -> None:
    bad, path = sink.bad, folder / "quarantine.jsonl"
    write_text(path, "".join(json.dumps({"where": q.where, "reason": q.reason}) + "\n" for q in bad))
    if bad:
        say(f"  {len(bad)} prompt(s) left out, listed in {path}; the first: {bad[0].where}: {bad[0].reason}")
    for reason, n in figures.counts["flags"].items():
        say(f"  {n:,} rows are left out: {reason}")
    if figures.otherwise:
        say(
            f"  {figures.otherwise:,} of {sum(figures.counts['rows'].values()):,} prompts were read by {engine.engine} as other ids than the "
            "target's template writes here; its own are kept, since they are what it answered"
        )


def _agreement(folder: Any, engine: Answering) -> dict[str, int] | None:
    """Greedy answers against the target's own argmax, on a sample: an answer that it would not give is not on its policy."""
    rows: list[tuple[list[int], int]] = []
    for row in conversations.read(folder, "held_out"):
        if row.temperature == 0 and row.source == "ids":
            rows.append((row.ids, len(row.prompt_ids)))
        if len(rows) == AGREEMENT_ROWS:
            break
    found = engine.agreement(rows) if rows else None
    if not found:
        return None
    agrees, positions = (sum(pair[i] for pair in found) for i in (0, 1))
    say(
        f"  of {len(rows)} greedy answers, {agrees / positions:.2%} of {positions:,} tokens are the target's own first choice"
    )
    return {"rows": len(rows), "agrees": agrees, "positions": positions}
