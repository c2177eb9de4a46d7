"""Tokenizers, chat templates and files for the tests of `purelora.data`."""

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from purelora.data import chat, examples, records
from purelora.weights import tokenizer

NOW = datetime.datetime(2025, 3, 9)

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Begins with a BOS and closes every turn with its own token.
LLAMA3 = """\
{{- bos_token }}
{%- if tools %}{{ '<|head|>system<|/head|>\\n\\n' + (tools | tojson) + '<|eot|>' }}{% endif %}
{%- for m in messages %}
{{- '<|head|>' + m['role'] + '<|/head|>\\n\\n' + (m['content'] | trim) + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# Calls the assistant "model", and puts the system prompt into the first user turn.
GEMMA3 = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}{% set turns = messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<turn>' + role + '\\n' + (prefix if loop.first else '') + m.content | trim + '<end>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# Has no system role, no header for the answer, and the end-of-text token as end of turn.
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant messages, not ' + m.role) }}
{%- endif %}
{%- endfor %}"""

# Keeps the reasoning of the last turn only, and gives a turn without reasoning an empty one.
QWEN3 = """\
{%- set ns = namespace(last_user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last_user %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
}
# The end-of-turn token of each template.
TURN_ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "gemma3": "<end>", "mistral": "</s>"}

SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<turn>",
    "<end>",
)

THREE_TURNS = (
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Uno."},
    {"role": "user", "content": "Twenty-two?"},
    {"role": "assistant", "content": "Ventidós — 22 🙂!"},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Tres,\n\ntres."},
)


def backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with some merges, and the special tokens of all the templates."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["the user and the assistant, one two three tres uno"] * 3, trainer)
    made.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return made


def make_tokenizer(
    chat_template: str | None = None,
    *,
    add_bos: bool = False,
    eos_token: str | None = "</s>",
    end_tokens: Sequence[str] = ("<|im_end|>", "<|eot|>", "<end>"),
    pad_token: str | None = None,
) -> tokenizer.Tokenizer:
    made = backend()
    named = {"bos_token": "<s>", "eos_token": eos_token, "pad_token": pad_token}
    return tokenizer.build(
        "test",
        made,
        special_tokens={name: token for name, token in named.items() if token is not None},
        end_ids=[made.token_to_id(token) for token in end_tokens],
        add_bos=add_bos,
        chat_template=chat_template,
    )


def compiled(source: str, **options: object) -> chat.ChatTemplate:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return chat.compile_template(source, special_tokens=special, options=options, now=NOW)


def encoder(
    made: tokenizer.Tokenizer,
    *,
    task: examples.Task = "sft",
    unnested_template: chat.UnnestedTemplate = "raise",
    **options: object,
) -> examples.Encoder:
    source = made.chat_template
    template = None if source is None else compiled(source, **options)
    return examples.Encoder(made, template, task, unnested_template)


def chat_record(
    messages: Sequence[Mapping[str, Any]] = THREE_TURNS,
    train: Sequence[bool] | None = None,
    where: str = "train.jsonl:1",
) -> records.Chat:
    if train is None:
        train = [message["role"] == "assistant" for message in messages]
    return records.Chat(where, "messages", tuple(map(dict, messages)), tuple(train))


def pair(question: str, answer: str, shape: str = "prompt", line: int = 1) -> records.Chat:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return records.Chat(f"train.jsonl:{line}", shape, messages, (False, True))


def write_jsonl(path: pathlib.Path, rows: Sequence[object]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
