"""Which tokens are supervised, template by template: each golden file spells out the rows of a conversation, the supervised text in ⟦⟧.

The templates in tests/golden/chat were written for these tests, after the formats of the families whose names they bear. To write a golden
file anew after a change that is meant: GOLDEN=1 pytest tests/stages/test_chat.py, and read the difference.
"""

import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.generate.chat import Chat, NotSpelled

FOLDER = Path(__file__).parents[1] / "golden" / "chat"
MARKS = ["<think>", "</think>"]  # which are no special tokens in the families that have them
FAMILIES = {  # name: special tokens, those that end a turn first
    "chatml": (["<|im_end|>"], 1),
    "llama3": (["<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], 2),
    "qwen3": (["<|im_end|>", "<|endoftext|>", "<|im_start|>"], 2),
    "gemma": (["<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"], 2),
    "harmony": (["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>"], 2),
    "deepseek": (["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"], 1),
    "kimi-k2": (["<|im_end|>", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"], 2),
    "kimi-k2.5": (["<|im_end|>", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"], 2),
}  # fmt: skip
CALL = {
    "id": "functions.add:0",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
}
MORE = {
    "id": "functions.add:1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 3, "b": 3}'},
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def said(role, content, **more):
    return {"role": role, "content": content, **more}


TWO = [
    said("user", "2+2?"),
    said("assistant", "4"),
    said("user", "and in words?"),
    said("assistant", "four, or <b>four</b>"),
]
THOUGHTS = [
    said("user", "2+2?"),
    said("assistant", "4", reasoning_content="two and two"),
    said("user", "and 3+3?"),
    said("assistant", "6", reasoning_content="three and three"),
]
CALLS = [
    said("user", "add"),
    said("assistant", "", tool_calls=[CALL, MORE], reasoning_content="I need it"),
    said("tool", "4", tool_call_id="functions.add:0", name="add"),
    said("tool", "6", tool_call_id="functions.add:1", name="add"),
    said("assistant", "4 and 6", reasoning_content="so"),
]
CASES = {  # golden file: family, template options, messages, tools
    "chatml": ("chatml", {}, [said("system", "be brief"), *TWO], None),
    "llama3": ("llama3", {}, [said("system", "be brief"), *TWO], None),
    "qwen3-thinking": ("qwen3", {}, THOUGHTS, None),
    "qwen3-empty-think": ("qwen3", {}, TWO, None),
    "qwen3-off": ("qwen3", {"enable_thinking": False}, TWO, None),
    "qwen3-tools": ("qwen3", {}, CALLS, TOOLS),
    "gemma": ("gemma", {}, TWO, None),
    "harmony": ("harmony", {}, [said("developer", "be brief"), *THOUGHTS], None),
    "harmony-call": ("harmony", {}, [CALLS[0], said("assistant", "", tool_calls=[CALL], reasoning_content="I need it")], TOOLS),
    "deepseek-thinking": ("deepseek", {"thinking": True}, THOUGHTS, None),
    "deepseek-off": ("deepseek", {"thinking": False}, [said("system", "be brief"), *TWO], None),
    "kimi-k2": ("kimi-k2", {}, [said("system", "be brief"), *TWO], None),
    "kimi-k2-tools": ("kimi-k2", {}, [{k: v for k, v in m.items() if k != "reasoning_content"} for m in CALLS], TOOLS),
    "kimi-k2.5-thinking": ("kimi-k2.5", {}, THOUGHTS, None),
    "kimi-k2.5-off": ("kimi-k2.5", {"thinking": False}, TWO, None),
    "kimi-k2.5-tools": ("kimi-k2.5", {}, CALLS[:4], TOOLS),
}  # fmt: skip


def tokenizer(family):
    special = FAMILIES[family][0]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tok.add_tokens([AddedToken(t, normalized=False) for t in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=tok, additional_special_tokens=special)
    made.chat_template = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    return made


def chat_of(family, options):
    tok = tokenizer(family)
    special, ends = FAMILIES[family]
    return Chat(tok, tuple(tok.convert_tokens_to_ids(special[:ends])), options)


def spelled(chat, messages, tools):
    """Each assistant turn as a row: its prompt, and in ⟦⟧ what is supervised."""
    rows = []
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            prompt, answer = chat.prompt(messages[:i], tools), chat.answer(messages[:i], m, tools)
            assert answer[-1] in chat.stop_ids, "the end of turn is supervised"
            text = (chat.tokenizer.decode(ids, skip_special_tokens=False) for ids in (prompt, answer))
            rows.append("{}⟦{}⟧".format(*text))
    return "\n----\n".join(rows) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_supervised_text_is_what_the_golden_file_spells(case):
    family, options, messages, tools = CASES[case]
    found = spelled(chat_of(family, options), messages, tools)
    path = FOLDER / f"{case}.txt"
    if os.environ.get("GOLDEN"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_no_earlier_thought_is_supervised():
    """In all golden files, each thought stands at most once between ⟦ and ⟧: in its own row."""
    for path in FOLDER.glob("*thinking.txt"):
        rows = path.read_text(encoding="utf-8").split("\n----\n")
        inside = [row[row.index("⟦") :] for row in rows]
        assert ["two and two" in s for s in inside] == [True, False]
        assert ["three and three" in s for s in inside] == [False, True]


def test_gemma_refuses_a_system_message_in_its_own_words():
    with pytest.raises(NotSpelled, match="System role not supported"):
        chat_of("gemma", {}).prompt([said("system", "x"), *TWO[:1]])


def test_a_template_that_does_not_go_on_from_its_own_prompt_cannot_spell_an_answer():
    """Kimi-K2.5 keeps the thoughts of calls until the answer is there, and empties them then: text alone does not tell its ids."""
    with pytest.raises(NotSpelled, match="does not go on from its own prompt"):
        chat_of("kimi-k2.5", {}).answer(CALLS[:4], CALLS[4], TOOLS)


def test_a_thought_that_a_template_leaves_out_cannot_be_spelled():
    chat = chat_of("chatml", {})
    with pytest.raises(NotSpelled, match="leaves an answer's thought out"):
        chat.answer(THOUGHTS[:1], THOUGHTS[1])


@pytest.mark.parametrize(
    "family, options, thinks, why",
    [
        ("chatml", {}, False, "no mark of a thought"),
        ("qwen3", {}, True, "knows </think>"),
        ("qwen3", {"enable_thinking": False}, False, "writes </think> before the answer"),
        ("kimi-k2.5", {}, True, "writes <think> before the answer"),
        ("kimi-k2.5", {"thinking": False}, False, "writes </think> before the answer"),
        ("deepseek", {"thinking": True}, True, "writes <think> before the answer"),
        ("harmony", {}, True, "knows <|channel|>final<|message|>"),
    ],
)
def test_whether_a_target_thinks_is_asked_of_its_template(family, options, thinks, why):
    found = chat_of(family, options).thinks("auto")
    assert found.value is thinks and why in found.reason
    assert chat_of(family, options).thinks(not thinks).value is not thinks


@pytest.mark.parametrize(
    "family, text, thought, content",
    [
        ("qwen3", "<think>\nwhy\n</think>\n\nso<|im_end|>", "why", "so"),
        ("qwen3", "<think>\n\n</think>\n\nso", "", "so"),
        ("qwen3", "so", None, "so"),
        ("qwen3", "<think>\nnever ends", "never ends", ""),
        ("kimi-k2.5", "why</think>so", "why", "so"),
        ("kimi-k2.5", "never ends", "never ends", ""),
        ("harmony", "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so<|return|>", "whyassistant", "so"),
        ("chatml", "<think>a word</think> so", None, "<think>a word</think> so"),
    ],
)  # fmt: skip
def test_thought_and_content_apart(family, text, thought, content):
    assert chat_of(family, {}).split(text) == (thought, content)
