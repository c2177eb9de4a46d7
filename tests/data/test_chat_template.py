"""Chat templates: rendering, assistant spans and masks, against texts written out by hand."""

import json
import pathlib

import jinja2
import numpy as np
import pytest

from purelora.core import errors
from purelora.data import chat
from purelora.interop import builtin
from tests.support.data_samples import (
    CHATML,
    GEMMA3,
    LLAMA3,
    MISTRAL,
    QWEN3,
    TEMPLATES,
    THREE_TURNS,
    TURN_ENDS,
    chat_record,
    compiled,
    encoder,
    make_tokenizer,
)

USER = {"role": "user", "content": "q"}


def assistant(content, **rest):
    return {"role": "assistant", "content": content, **rest}


def supervised_text(template, messages, **options):
    """What is trained on, turn by turn."""
    unnested = options.pop("unnested_template", "raise")
    rendered = chat.render(
        chat_record(messages), compiled(template, **options), unnested_template=unnested
    )
    return [rendered.text[begin:end] for begin, end in rendered.spans]


# What the model has to write in each turn, the end of turn included.
EXPECTED = {
    "chatml": ["Uno.<|im_end|>\n", "Ventidós — 22 🙂!<|im_end|>\n", "Tres,\n\ntres.<|im_end|>\n"],
    "llama3": ["Uno.<|eot|>", "Ventidós — 22 🙂!<|eot|>", "Tres,\n\ntres.<|eot|>"],
    "gemma3": ["Uno.<end>\n", "Ventidós — 22 🙂!<end>\n", "Tres,\n\ntres.<end>\n"],
    "mistral": [" Uno.</s>", " Ventidós — 22 🙂!</s>", " Tres,\n\ntres.</s>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_assistant_turns_are_found(name):
    assert supervised_text(TEMPLATES[name], THREE_TURNS) == EXPECTED[name]


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma3"])
def test_system_prompt_is_never_supervised(name):
    messages = ({"role": "system", "content": "Be brief."}, *THREE_TURNS)
    assert supervised_text(TEMPLATES[name], messages) == EXPECTED[name]


def test_tool_messages_and_tools_are_not_supervised():
    messages = (
        USER,
        assistant("call f"),
        {"role": "tool", "content": "42"},
        assistant("It is 42."),
    )
    record = chat_record(messages)
    record = type(record)(record.where, "messages", record.messages, record.train, ({"name": "f"},))
    rendered = chat.render(record, compiled(LLAMA3), unnested_template="raise")
    assert '<|head|>system<|/head|>\n\n[{"name": "f"}]<|eot|>' in rendered.text
    turns = [rendered.text[begin:end] for begin, end in rendered.spans]
    assert turns == ["call f<|eot|>", "It is 42.<|eot|>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_mask_decodes_to_the_turns(name):
    """Stock templates have no marker, and yet every turn has its targets."""
    tokenizer = make_tokenizer(TEMPLATES[name], add_bos=True)
    example = encoder(tokenizer).encode(chat_record()).example
    turns = np.split(np.flatnonzero(example.supervised), breaks(example.supervised))
    decoded = [tokenizer.decode(example.tokens[turn]) for turn in turns]
    assert decoded == EXPECTED[name]
    end = tokenizer.backend.token_to_id(TURN_ENDS[name])
    assert all((example.tokens[turn] == end).sum() == 1 for turn in turns)


def breaks(mask):
    """Where, in the indices of the true values, a new run begins."""
    return np.flatnonzero(np.diff(np.flatnonzero(mask)) > 1) + 1


def test_train_flags_choose_the_turns():
    record = chat_record(train=[False, True, False, False, False, True])
    rendered = chat.render(record, compiled(CHATML), unnested_template="raise")
    turns = [rendered.text[begin:end] for begin, end in rendered.spans]
    assert turns == [EXPECTED["chatml"][0], EXPECTED["chatml"][2]]


def test_tokens_at_the_borders_of_a_span():
    # Tokens: before; reaching into the span; inside; reaching out of it; behind.
    offsets = np.array([[0, 2], [2, 5], [5, 6], [6, 9], [9, 12]], np.int32)
    assert chat.spans_mask(offsets, [(3, 7)]).tolist() == [False, False, True, True, False]
    assert chat.spans_mask(offsets, [(2, 5), (9, 12)]).tolist() == [False, True, False, False, True]
    assert not chat.spans_mask(offsets, []).any()


# Templates that do not nest ---------------------------------------------------------------------

THINKING = (
    {"role": "user", "content": "1+1?"},
    assistant("2", reasoning_content="easy"),
    {"role": "user", "content": "2+2?"},
    assistant("4", reasoning_content="harder"),
)


def test_unnested_template_raises_by_name():
    with pytest.raises(
        errors.DataError,
        match=r"train\.jsonl:1 = '2': the chat template renders message 1 .*data\.unnested_template"
        "='last_turn'",
    ):
        supervised_text(QWEN3, THINKING)


def test_unnested_template_trains_on_the_last_turn():
    turns = supervised_text(QWEN3, THINKING, unnested_template="last_turn")
    assert turns == ["<think>\nharder\n</think>\n\n4<|im_end|>\n"]


def test_single_turn_of_an_unnested_template_nests():
    rendered = chat.render(
        chat_record(THINKING[:2]), compiled(QWEN3), unnested_template="last_turn"
    )
    assert not rendered.last_turn_only
    assert len(rendered.spans) == 1


def test_unnested_chat_whose_last_turn_is_not_trained():
    record = chat_record(THINKING, train=[False, True, False, False])
    rendered = chat.render(record, compiled(QWEN3), unnested_template="last_turn")
    assert rendered.spans == ()
    assert rendered.last_turn_only


def test_last_turn_must_nest_itself():
    # A user message behind the last turn strips its reasoning.
    messages = (*THINKING, {"role": "user", "content": "3+3?"})
    with pytest.raises(errors.DataError, match="message 3 .*; remove the row"):
        supervised_text(QWEN3, messages, unnested_template="last_turn")


def test_generation_prompt_that_the_answer_does_not_begin_with():
    # At inference the model is made to think; the template has no thought in the answers it shows.
    source = CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'")
    assert source != CHATML
    with pytest.raises(errors.DataError, match="renders message 1 "):
        supervised_text(source, (USER, assistant("a")))


def test_empty_reasoning_of_the_generation_prompt_is_not_supervised():
    messages = (USER, assistant("a"))
    assert supervised_text(QWEN3, messages, enable_thinking=False) == ["a<|im_end|>\n"]
    assert supervised_text(QWEN3, messages) == ["<think>\n\n</think>\n\na<|im_end|>\n"]


# What templates may do --------------------------------------------------------------------------


def test_template_functions():
    template = compiled(
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% break %}{% endfor %}"
        "{{ strftime_now('%d %b %Y') }}\n"
        "{% generation %}{{ bos_token }}{% endgeneration %}{{ mode }}",
        mode="fast",
    )
    text = template.render(
        [{"role": "tool"}, {"b": "<é>", "a": 1}, {}],
        tools=None,
        add_generation_prompt=False,
        where="w",
    )
    assert text == '{"b": "<é>", "a": 1}09 Mar 2025\n<s>fast'


def test_blocks_leave_no_white_space():
    text = compiled("  {% if true %}\nx\n  {% endif %}\ny").render(
        [], tools=None, add_generation_prompt=False, where="w"
    )
    assert text == "x\ny"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ raise_exception('no ' + messages[0].role) }}", r"line 2 for the .*: no user"),
        ("a\n\n{{ messages[7].role }}", r"t\.jsonl:5 = \['user'\].* in its line 3 .*no element 7"),
        ("{{ 'a' + 1 }}", r"line 1 for"),
        ("{{ 1 // 0 }}", r"line 1 for"),
        ("x\n{{ messages.append(1) }}", r"line 2 for .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", r"line 1 for .*unsafe"),
        ("{{ messages | tojson(indent='a', x=1) }}", r"line 1 for"),
    ],
)
def test_template_faults_name_record_and_line(source, message):
    with pytest.raises(errors.DataError, match=message) as caught:
        compiled(source).render([USER], tools=None, add_generation_prompt=False, where="t.jsonl:5")
    assert isinstance(caught.value.__cause__, (jinja2.TemplateError, TypeError, ArithmeticError))


def test_a_template_that_does_not_parse():
    with pytest.raises(errors.DataError, match=r"chat_template:2 = '\{% fi %\}': does not parse"):
        compiled("a\n{% fi %}")


@pytest.mark.parametrize(
    ("template", "role", "message"),
    [(MISTRAL, "system", "only user and assistant messages, not system"), (GEMMA3, "tool", "alt")],
)
def test_roles_that_a_template_refuses(template, role, message):
    record = chat_record(({"role": role, "content": "s"}, USER, assistant("a")))
    with pytest.raises(errors.DataError, match=rf"train\.jsonl:1 = .*line \d+ .*{message}"):
        chat.render(record, compiled(template), unnested_template="raise")


def test_templates_cannot_change_the_messages():
    messages = [dict(USER)]
    with pytest.raises(errors.DataError, match="unsafe"):
        compiled("{{ messages[0].update({'content': 'x'}) }}").render(
            messages, tools=None, add_generation_prompt=False, where="w"
        )
    assert messages == [USER]


# Independent references -------------------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.parametrize("name", [*TEMPLATES, "qwen3"])
def test_ids_equal_transformers(name):
    transformers = pytest.importorskip("transformers")
    source = (TEMPLATES | {"qwen3": QWEN3})[name]
    tokenizer = make_tokenizer(source, add_bos=name in ("llama3", "gemma3", "mistral"))
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<s>", eos_token="</s>", chat_template=source
    )
    want = reference.apply_chat_template(list(THREE_TURNS), tokenize=True, return_dict=False)
    example = encoder(tokenizer, unnested_template="last_turn").encode(chat_record()).example
    assert example.tokens.tolist() == want
    assert example.tokens.dtype == np.int32


@pytest.mark.reference
def test_tool_text_equals_transformers():
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer(LLAMA3)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<s>", eos_token="</s>", chat_template=LLAMA3
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    want = reference.apply_chat_template(list(THREE_TURNS), tools=tools, tokenize=False)
    got = compiled(LLAMA3).render(THREE_TURNS, tools=tools, add_generation_prompt=False, where="w")
    assert got == want


@pytest.mark.download
def test_smollm2_example():
    """Against ids and prompt length that transformers gave."""
    oracle = json.loads(
        (pathlib.Path(__file__).parents[1] / "oracles" / "smollm2_135m.json").read_text("utf-8")
    )["sft"]
    tokenizer = builtin.open_model("smollm2-135m").tokenizer
    answer = "The three primary colors are red, blue, and yellow."
    record = chat_record(
        ({"role": "user", "content": "Name three primary colors."}, assistant(answer))
    )
    example = encoder(tokenizer).encode(record).example
    assert example.tokens.tolist() == oracle["ids"]
    assert np.flatnonzero(example.supervised).tolist() == list(range(oracle["prompt_len"], 49))
