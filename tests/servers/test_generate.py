"""generate through servers that misbehave, think, call tools, and return ids or none: what becomes rows, and what is said of the rest."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import yaml

from eyas import pipeline
from eyas.errors import ContractError, RequestError, StaleError, SurroundingsError, UsageError
from eyas.generate import answering, client, parts
from eyas.generate.client import Patience
from eyas.stores import conversations
from tests.conftest import END, TEMPLATE, byte_tokenizer, save_target, write_recipe
from tests.servers.stub import Stub

THINKING = TEMPLATE.replace(
    "<assistant>{{ m.content }}<end>",
    "<assistant>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<end>",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Seconds become hundredths."""
    patience = Patience(connect_s=1, answer_s=20, ping_s=0.3, pong_s=0.3, tries=4, wait_s=0.02, longest_s=0.1, give_up_s=1.5)  # fmt: skip
    monkeypatch.setattr(answering.Server, "_patience", lambda self: patience)


def generate(recipe_file, folder, stub, *sets, urls=()):
    words = ("engine.name=vllm", f"engine.url={stub.url}", "generate.max_tokens=100", *sets)
    if urls:
        words += (f"generate.endpoints={json.dumps(list(urls))}",)
    return pipeline.run(str(recipe_file), words, str(folder), last="generate")["generate"]


def rows(folder, flagged=False):
    every = [r for p in conversations.parts(folder / "conversations") for r in conversations.read_part(p)]
    return {r.row_id: r for r in every if flagged or not r.flag}


def left_out(folder):
    lines = (folder / "conversations" / "quarantine.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def prompts_of(tmp_path, *values):
    """A file of these prompts among enough others for both sides."""
    path = tmp_path / "prompts.jsonl"
    more = [{"prompt": f"why is the sky number {i} so blue"} for i in range(12)]
    path.write_text("\n".join(json.dumps(v) for v in [*values, *more]), encoding="utf-8")
    return f"prompts.sources=[{{path: {path}}}]"


@pytest.fixture(scope="module")
def well(tmp_path_factory, target_folder, prompt_file):
    """Rows of a run without any fault."""
    folder = tmp_path_factory.mktemp("well")
    recipe = write_recipe(folder / "tiny.yaml", target_folder, prompt_file)
    with Stub(byte_tokenizer()) as stub:
        made = generate(recipe, folder / "run", stub)
    found = rows(folder / "run")
    assert len(found) == sum(made["rows"].values()) == 27 and made["quarantined"] == 0
    assert made["ids_from"] == {"ids": 27} and made["on_policy"]["agrees"] == made["on_policy"]["positions"]
    return {name: (r.prompt_ids, r.completion_ids, r.split) for name, r in found.items()}


def same(folder, well):
    assert {n: (r.prompt_ids, r.completion_ids, r.split) for n, r in rows(folder).items()} == well


@pytest.mark.parametrize("fault", ["slow", "429", "503", "500", "half", "reset", "html", "list"])
def test_faults_that_pass_leave_the_rows_of_a_run_without_them(recipe_file, tmp_path, well, fault, capsys):
    with Stub(byte_tokenizer(), lambda r: fault if r.times == 0 and r.number % 2 else "well") as stub:
        made = generate(recipe_file, tmp_path / "run", stub)
    same(tmp_path / "run", well)
    assert made["quarantined"] == 0
    assert fault == "slow" or "asked again" in capsys.readouterr().err


def test_several_servers_of_which_one_is_not_there_and_one_dies(recipe_file, tmp_path, well, capsys):
    with Stub(byte_tokenizer()) as gone:
        nowhere = gone.url
    with (
        Stub(byte_tokenizer(), lambda r: "well" if r.number < 5 else "reset") as dies,
        Stub(byte_tokenizer()) as good,
    ):
        made = generate(recipe_file, tmp_path / "run", dies, urls=[good.url, nowhere])
    same(tmp_path / "run", well)
    said = capsys.readouterr().err
    assert (
        made["engine"] == "2 servers"
        and f"{nowhere}/v1/models: nobody answers" in said
        and "set aside" in said
    )


@pytest.mark.parametrize(
    "fault, kind, said",
    [
        ("other", ContractError, 'answers as "another"'),
        ("strange", ContractError, "do not spell their texts"),
        ("400", RequestError, "words of 400"),
        ("401", SurroundingsError, "EYAS_API_KEY"),
        ("reset", SurroundingsError, "no server has answered"),
        ("hang", SurroundingsError, "no server has answered"),
        ("miscounted", UsageError, "returns no token ids"),
    ],
)
def test_faults_that_stay_stop_the_run_with_their_name_and_leave_no_row(recipe_file, tmp_path, fault, kind, said):  # fmt: skip
    with Stub(byte_tokenizer(), lambda r: fault) as stub, pytest.raises(kind, match=said):
        generate(recipe_file, tmp_path / "run", stub)
    assert not rows(tmp_path / "run", flagged=True)


def test_what_was_answered_before_a_server_died_is_not_asked_again(recipe_file, tmp_path, well):
    dies = lambda r: "well" if r.number < 20 else "reset"  # noqa: E731
    with (
        Stub(byte_tokenizer(), dies) as stub,
        pytest.raises(SurroundingsError, match="What was answered before is kept"),
    ):
        generate(recipe_file, tmp_path / "run", stub)
    before = rows(tmp_path / "run")
    assert len(before) >= 18
    with Stub(byte_tokenizer()) as stub:
        generate(recipe_file, tmp_path / "run", stub)
        assert stub.count == len(well) - len(before)
    same(tmp_path / "run", well)


def test_one_prompt_that_is_refused_is_left_out_and_named(recipe_file, tmp_path):
    poison = lambda r: "400" if "question seven" in json.dumps(r.body) else "well"  # noqa: E731
    with Stub(byte_tokenizer(), poison) as stub:
        made = generate(
            recipe_file,
            tmp_path / "run",
            stub,
            prompts_of(tmp_path, {"prompt": "question seven", "id": "x7"}),
        )
    assert made["quarantined"] == 1 and sum(made["rows"].values()) == 12
    assert left_out(tmp_path / "run") == [
        {"where": "x7", "reason": f"turn 1: {stub.url} refuses the request (400): words of 400"}
    ]


def test_a_huge_answer_costs_only_itself(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "LARGEST", 2**20)
    huge = lambda r: "huge" if "question seven" in json.dumps(r.body) else "well"  # noqa: E731
    with Stub(byte_tokenizer(), huge) as stub:
        made = generate(
            recipe_file, tmp_path / "run", stub, prompts_of(tmp_path, {"prompt": "question seven"})
        )
    assert made["quarantined"] == 1 and "more than 1 MiB" in left_out(tmp_path / "run")[0]["reason"]


# ---- ids and texts ----


def test_some_answers_whose_ids_do_not_spell_their_text_are_left_out_of_everything(recipe_file, tmp_path, well):  # fmt: skip
    with Stub(byte_tokenizer(), lambda r: "strange" if r.number % 3 == 0 else "well") as stub:
        made = generate(recipe_file, tmp_path / "run", stub)
    assert made["flagged"] == {"its ids do not spell its text": 9}
    kept = rows(tmp_path / "run")
    assert len(kept) == 18 == sum(made["rows"].values()) and len(rows(tmp_path / "run", flagged=True)) == 27
    assert all(well[n] == (r.prompt_ids, r.completion_ids, r.split) for n, r in kept.items())
    with Stub(byte_tokenizer()) as stub:
        pipeline.run(str(recipe_file), ("engine.name=vllm", f"engine.url={stub.url}", "generate.max_tokens=100"), str(tmp_path / "run"), last="generate")  # fmt: skip
        assert stub.count == 0, "they are not asked again"


def test_texts_without_ids_are_tokenised_again_where_the_server_counted_as_many(recipe_file, tmp_path, well):
    with Stub(byte_tokenizer(), lambda r: "miscounted" if r.number % 3 == 0 else "text") as stub:
        made = generate(recipe_file, tmp_path / "run", stub)
    reason = "tokenised again, it has another length than the server counted"
    assert made["flagged"] == {reason: 9} and made["ids_from"] == {"text": 18}
    kept = rows(tmp_path / "run")
    assert all(well[n] == (r.prompt_ids, r.completion_ids, r.split) for n, r in kept.items())
    assert all(r.source == "text" and r.completion_ids[-1] == END for r in kept.values())
    with Stub(byte_tokenizer(), lambda r: "miscounted") as stub:
        generate(recipe_file, tmp_path / "kept", stub, "generate.retokenised=keep")
    same(tmp_path / "kept", well)


def test_the_prompt_that_is_trained_on_is_the_one_that_the_server_saw(recipe_file, tmp_path, capsys):
    """It reads every third prompt with a word more."""

    class Otherwise(Stub):
        def render(self, body):
            more = self.tokenizer(" well" if self.count % 3 == 0 else "", add_special_tokens=False)[
                "input_ids"
            ]
            return super().render(body) + more

    with Otherwise(byte_tokenizer()) as stub:
        made = generate(recipe_file, tmp_path / "run", stub)
    assert made["read_otherwise"] == 9 and "read by the server at" in capsys.readouterr().err
    assert (
        sum(byte_tokenizer().decode(r.prompt_ids).endswith(" well") for r in rows(tmp_path / "run").values())
        == 9
    )


# ---- thoughts ----


@pytest.fixture(scope="module")
def thinker(tmp_path_factory, prompt_file):
    """A target whose template knows thoughts, and its tokenizer."""
    folder = save_target(tmp_path_factory.mktemp("thinker"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder)
    return write_recipe(folder.parent / f"{folder.name}.yaml", folder, prompt_file), tokenizer


def thinks(tokenizer, place, cut=False):
    """An answer with a thought, in one of the places where servers put it."""

    def answer(body):
        text = "<think>it is so</think>" + ("" if cut else "yes")
        ids = tokenizer(text if not cut else "<think>it is s", add_special_tokens=False)["input_ids"]
        message = {
            "reasoning": {"content": None if cut else "yes", "reasoning": "it is so"},
            "reasoning_content": {"content": None if cut else "yes", "reasoning_content": "it is so"},
            "inline": {"content": text if not cut else "<think>it is s"},
            "none": {"content": "yes"},
        }[place]
        if place == "none":
            ids = tokenizer("yes", add_special_tokens=False)["input_ids"]
        return message, ids if cut else [*ids, END], "length" if cut else "stop"

    return answer


@pytest.mark.parametrize("place", ["reasoning", "reasoning_content", "inline"])
def test_a_thought_is_kept_in_the_ids_and_apart_in_the_history(thinker, tmp_path, place):
    recipe, tokenizer = thinker
    with Stub(tokenizer, answer=thinks(tokenizer, place)) as stub:
        made = generate(recipe, tmp_path / "run", stub)
        again = [b["messages"] for b in stub.bodies if len(b["messages"]) == 3]
    found = rows(tmp_path / "run").values()
    assert made["truth"]["thoughts"] == 1.0 and all(
        r.reasoning == "it is so" and r.text == "yes" for r in found
    )
    assert all(tokenizer.decode(r.completion_ids) == "<think>it is so</think>yes<end>" for r in found)
    second = [r for r in found if r.turn == 1]
    assert second and all("it is so" not in tokenizer.decode(r.prompt_ids) for r in second)
    assert again and all(m[1]["reasoning"] == m[1]["reasoning_content"] == "it is so" for m in again)


@pytest.mark.parametrize("place", ["reasoning", "inline"])
def test_an_answer_cut_while_thinking_is_a_row_and_its_conversation_goes_on(thinker, tmp_path, place):
    recipe, tokenizer = thinker
    with Stub(tokenizer, answer=thinks(tokenizer, place, cut=True)) as stub:
        made = generate(recipe, tmp_path / "run", stub)
    assert sum(made["rows"].values()) == 27 and made["quarantined"] == 0
    assert made["truth"]["cut_while_thinking"] == 1.0 and made["finish"] == {"length": 27}


def test_a_target_that_should_think_and_does_not_is_stopped_early(thinker, tmp_path):
    recipe, tokenizer = thinker
    with Stub(tokenizer, answer=thinks(tokenizer, "none")) as stub:
        with pytest.raises(
            UsageError, match="none of 16 answers .* holds a thought.*generate.thinking: false"
        ):
            generate(recipe, tmp_path / "run", stub)
        assert stub.count < 27 and not rows(tmp_path / "run")
        generate(recipe, tmp_path / "run2", stub, "generate.thinking=false")
    assert len(rows(tmp_path / "run2")) == 27


def test_options_of_the_template_are_sent_and_rendered(recipe_file, target_folder, tmp_path, prompt_file):
    folder = shutil.copytree(target_folder, tmp_path / "target")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ mood }}" + TEMPLATE
    tokenizer.save_pretrained(folder)
    recipe = write_recipe(tmp_path / "mood.yaml", folder, prompt_file)
    with Stub(tokenizer) as stub:
        made = generate(recipe, tmp_path / "run", stub, "generate.template={mood: calm}")
        assert all(b["chat_template_kwargs"] == {"mood": "calm"} for b in stub.bodies)
    assert made["read_otherwise"] == 0
    assert all(tokenizer.decode(r.prompt_ids).startswith("calm") for r in rows(tmp_path / "run").values())


# ---- tools ----

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RECORDED = {
    "id": "sum",
    "tools": [ADD],
    "messages": [
        {"role": "developer", "content": "use the tool"},
        {"role": "user", "content": "what is two and two, and three and three"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "r1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
                },
                {
                    "id": "r2",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 3, "b": 3}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "r1", "content": "4"},
        {"role": "tool", "tool_call_id": "r2", "content": "6"},
        {"role": "assistant", "content": "4 and 6"},
        {"role": "user", "content": "thank you"},
    ],
}


def calls(tokenizer, *arguments):
    """Parallel calls of add at the first turn of a prompt with tools; words otherwise."""

    def answer(body):
        if not body.get("tools") or any(m["role"] == "tool" for m in body["messages"]):
            return None
        made = [
            {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": a}}
            for i, a in enumerate(arguments)
        ]
        ids = [
            *tokenizer("add(" + ") add(".join(arguments) + ")", add_special_tokens=False)["input_ids"],
            END,
        ]
        return {"content": None, "tool_calls": made}, ids, "tool_calls"

    return answer


def test_calls_are_answered_by_what_the_prompt_recorded(recipe_file, tmp_path):
    tokenizer = byte_tokenizer()
    with Stub(tokenizer, answer=calls(tokenizer, '{"b": 2, "a": 2}', '{"a": 3, "b": 3}')) as stub:
        made = generate(recipe_file, tmp_path / "run", stub, prompts_of(tmp_path, RECORDED))
        sent = [b for b in stub.bodies if b.get("tools")]
    assert made["quarantined"] == made["unanswered_calls"] == 0 and len(rows(tmp_path / "run")) == 12 + 3
    assert [[m["role"] for m in b["messages"]] for b in sent] == [
        ["developer", "user"],
        ["developer", "user", "assistant", "tool", "tool"],
        ["developer", "user", "assistant", "tool", "tool", "assistant", "user"],
    ]
    assert [m["content"] for m in sent[1]["messages"][3:]] == ["4", "6"]
    mine = sorted((r for r in rows(tmp_path / "run").values() if r.prompt_id == "sum"), key=lambda r: r.turn)
    assert [r.finish_reason for r in mine] == ["tool_calls", "stop", "stop"]
    assert all(json.loads(r.tools) == [ADD] for r in mine) and len(json.loads(mine[0].calls)) == 2
    assert [m["content"] for m in json.loads(mine[0].results)] == ["4", "6"]


def test_a_call_without_a_result_is_a_row_and_ends_its_conversation(recipe_file, tmp_path):
    tokenizer = byte_tokenizer()
    with Stub(tokenizer, answer=calls(tokenizer, '{"a": 7, "b": 7}')) as stub:
        made = generate(recipe_file, tmp_path / "run", stub, prompts_of(tmp_path, RECORDED))
    assert made["unanswered_calls"] == 1 and len(rows(tmp_path / "run")) == 12 + 1
    assert 'its call of "add" has no result' in left_out(tmp_path / "run")[0]["reason"]


def test_calls_are_answered_by_the_users_function_and_a_resumed_run_remembers_what_it_said(recipe_file, tmp_path):  # fmt: skip
    tools = tmp_path / "tools.py"
    tools.write_text(
        "import pathlib\n"
        "def call(name, arguments):\n"
        "    log = pathlib.Path(__file__).with_name('called')\n"
        "    log.write_text((log.read_text() if log.exists() else '') + name + '\\n')\n"
        "    if arguments['a'] == 9:\n        raise ValueError('no nines')\n"
        "    return {'sum': arguments['a'] + arguments['b']}\n"
    )
    tokenizer, sources = byte_tokenizer(), prompts_of(tmp_path, RECORDED)
    answer = calls(tokenizer, '{"a": 7, "b": 7}', '{"a": 9, "b": 1}')
    dies = lambda r: "reset" if any(m["role"] == "tool" for m in r.body["messages"]) else "well"  # noqa: E731
    words = (sources, f"generate.tools={tools}:call")
    with Stub(tokenizer, dies, answer=answer) as stub, pytest.raises(SurroundingsError):
        generate(recipe_file, tmp_path / "run", stub, *words)
    with Stub(tokenizer, answer=answer) as stub:
        generate(recipe_file, tmp_path / "run", stub, *words)
        assert stub.count == 2, "the call itself is not asked again"
    assert (tmp_path / "called").read_text() == "add\nadd\n", "nor is the function called again"
    mine = sorted((r for r in rows(tmp_path / "run").values() if r.prompt_id == "sum"), key=lambda r: r.turn)
    assert [m["content"] for m in json.loads(mine[0].results)] == ['{"sum": 14}', "error: no nines"]
    assert "no nines" in tokenizer.decode(mine[1].prompt_ids)


@pytest.mark.parametrize("word", ["nofile.py:call", "tools.py:other", "tools.py", "tools.py:x"])
def test_a_function_that_is_not_there_is_named(recipe_file, tmp_path, word):
    (tmp_path / "tools.py").write_text("x = 3\n")
    with Stub(byte_tokenizer()) as stub, pytest.raises(UsageError, match=r"generate\.tools"):
        generate(recipe_file, tmp_path / "run", stub, f"generate.tools={tmp_path}/{word}")


# ---- going on ----


def test_a_torn_part_a_doubled_one_and_another_order_lose_and_double_nothing(recipe_file, tmp_path, well, prompt_file, monkeypatch, capsys):  # fmt: skip
    monkeypatch.setattr("eyas.generate.stage.WAVES", 1)
    folder = tmp_path / "run" / "conversations"
    with Stub(byte_tokenizer()) as stub:
        generate(recipe_file, tmp_path / "run", stub)
        found = conversations.parts(folder)
        assert len(found) == 5
        found[1].write_bytes(found[1].read_bytes()[:-100])
        shutil.copy(found[2], folder / "part-00077.parquet")
        (folder / "manifest.json").unlink()
        other = tmp_path / "shuffled.jsonl"
        lines = prompt_file.read_text().splitlines()
        random.Random(1).shuffle(lines)
        other.write_text("\n".join(lines))
        before = stub.count
        generate(
            recipe_file,
            tmp_path / "run",
            stub,
            f"prompts.sources=[{{path: {other}}}]",
            "generate.concurrency=3",
        )
        assert stub.count - before == 6, "only the rows of the torn part"
    same(tmp_path / "run", well)
    every = [r.row_id for p in conversations.parts(folder) for r in conversations.read_part(p)]
    assert len(every) == len(set(every)) == 27
    said = capsys.readouterr().err
    assert "goes on with what is there and still wanted, since prompts.sources was" in said
    assert "set aside as torn-part-00001.parquet" in said


def test_more_prompts_keep_the_answers_and_fewer_drop_theirs(recipe_file, tmp_path, well, capsys):
    with Stub(byte_tokenizer()) as stub:
        generate(recipe_file, tmp_path / "run", stub, "prompts.limit=16")
        before = stub.count
        generate(recipe_file, tmp_path / "run", stub)
        assert stub.count == len(well) and before < len(well)
        same(tmp_path / "run", well)
        generate(recipe_file, tmp_path / "run", stub, "prompts.limit=16")
        assert stub.count == len(well) and len(rows(tmp_path / "run")) == before
    assert (
        f"{len(well) - before} rows of prompts that the recipe no longer has were dropped"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("change", ["generate.temperature=0.5", "generate.max_tokens=50", "generate.template={a: 1}"])  # fmt: skip
def test_another_sampling_makes_old_rows_stale_by_name(recipe_file, tmp_path, change):
    with Stub(byte_tokenizer()) as stub:
        generate(recipe_file, tmp_path / "run", stub)
        with pytest.raises(StaleError, match=change.split("=")[0]):
            generate(recipe_file, tmp_path / "run", stub, change)
    assert len(rows(tmp_path / "run")) == 27


def test_twenty_kills_of_a_run_through_a_server_lose_and_double_nothing(recipe_file, tmp_path, prompt_file):
    """kill -9 at random moments while answers come, with another concurrency each time."""
    values = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    many = [v | {"turns": [f"{t} {i}" for t in v["turns"]], "id": f"{v['id']}-{i}"} for i in range(12) for v in values]  # fmt: skip
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps(v) for v in many))
    body = yaml.safe_load(recipe_file.read_text())
    body["prompts"]["sources"], body["generate"]["max_tokens"] = [{"path": str(path)}], 100
    rng = random.Random(3)
    with Stub(byte_tokenizer(), lambda r: "slow") as stub:
        body["engine"] = {"name": "vllm", "url": stub.url}
        recipe_file.write_text(yaml.safe_dump(body))
        killed, seen = 0, 0
        while killed < 20:
            command = [sys.executable, "-m", "eyas", "run", str(recipe_file), "--run", str(tmp_path / "run"), "--until", "generate"]  # fmt: skip
            at_once = f"generate.concurrency={rng.choice([1, 2, 4])}"
            process = subprocess.Popen([*command, "--set", at_once], stderr=subprocess.DEVNULL)
            began, seen = time.monotonic(), stub.count
            while stub.count == seen and process.poll() is None and time.monotonic() - began < 60:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.8))
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        done = subprocess.run([*command, "--set", "generate.concurrency=16"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert max(stub.asked.values()) > 1, "something was in hand when it was killed"
    every = [
        r for p in conversations.parts(tmp_path / "run" / "conversations") for r in conversations.read_part(p)
    ]
    assert len(every) == len({r.row_id for r in every}) == 12 * 27
    assert all(byte_tokenizer().decode(r.completion_ids, skip_special_tokens=True) == r.text for r in every)
    assert [p.name for p in (tmp_path / "run").rglob(".*")] == [".lock"], "what killed runs left is swept"


def test_a_part_is_written_after_a_while_full_or_not(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "FLUSH_S", 0.0)
    row = conversations.Row("a", "p", "k", "d", "train", 0, 0, [1], [2], "stop", 0.8, 1.0, "f")
    with parts.Parts(tmp_path, 100, None) as made:
        made.add(row)
        made.add(replace(row, row_id="b"))
    assert len(conversations.parts(tmp_path)) == 2


def test_ctrl_c_keeps_every_answer_that_has_come(recipe_file, tmp_path, well):
    with Stub(byte_tokenizer(), lambda r: "slow") as stub:
        words = ["--set", "engine.name=vllm", "--set", f"engine.url={stub.url}", "--set", "generate.max_tokens=100", "--set", "generate.concurrency=1"]  # fmt: skip
        command = [sys.executable, "-m", "eyas", "run", str(recipe_file), "--run", str(tmp_path / "run"), "--until", "generate", *words]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while stub.count < 12 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in said
        had, kept = stub.count, len(rows(tmp_path / "run"))
        assert kept == had < len(well), "also the answers that were on their way"
        done = subprocess.run(command, stderr=subprocess.DEVNULL)
        assert done.returncode == 0 and stub.count == len(well)
    same(tmp_path / "run", well)
