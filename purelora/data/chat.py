"""Renders chats and marks the tokens that are trained on.

A chat template is a Jinja program, and most have no marker for the assistant's text. The text of an
assistant turn is found by rendering prefixes of the conversation instead:

    before_k = template(messages[:k], generation prompt)   what the model is given at inference
    after_k  = template(messages[:k + 1])                  and with its answer
    whole    = template(messages)

`before_k` must begin `after_k`, which must begin `whole`; what `after_k` adds to `before_k` is what
the model has to write, the end-of-turn token and what the template puts after it included. The
whole text is tokenised once, so its ids are those that inference sees.

A token is trained on if it begins inside an assistant turn. One that begins before the turn and
ends in it is not: the model never sees the prompt cut in its middle. One that begins in the turn
and ends behind it is.
"""

import dataclasses
import datetime
import json
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from purelora.core import errors
from purelora.data import records
from purelora.weights import tokenizer

UnnestedTemplate = Literal["raise", "last_turn"]
Span = tuple[int, int]

# What a template can do wrong while it renders: its own errors, and those of the Python operators
# and filters that it calls.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template and what it reads besides messages and tools.

    Attributes:
      template: the Jinja template.
      variables: special tokens by name, and options such as `enable_thinking`.
    """

    template: jinja2.Template
    variables: Mapping[str, object]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        where: str,
    ) -> str:
        """The text of `messages`; `where` names the record in an error."""
        try:
            return self.template.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except _TEMPLATE_FAULTS as error:
            raise errors.DataError(
                where,
                [message["role"] for message in messages],
                f"the chat template fails in its line {_template_line(error)} "
                f"for the first {len(messages)} messages: {error}",
                "change the messages to what the template accepts, or remove the row",
            ) from error


def compile_template(
    source: str,
    *,
    special_tokens: Mapping[str, str],
    options: Mapping[str, object],
    now: datetime.datetime,
) -> ChatTemplate:
    """Compiles a template in a sandbox, with the functions that published templates call.

    Args:
      source: the template.
      special_tokens: `bos_token` and the like, by name.
      options: further variables of the template, such as `enable_thinking`.
      now: what the template's `strftime_now` formats. One value for a whole run, stored with it:
        otherwise the ids of a template that prints the date change overnight.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        line = (source.splitlines() or [""])[min(error.lineno, len(source.splitlines())) - 1]
        raise errors.DataError(
            f"chat_template:{error.lineno}", line, f"does not parse: {error.message}", "fix it"
        ) from error
    except (ValueError, SyntaxError, RuntimeError, MemoryError) as error:
        what = f"does not compile: {error}"
        raise errors.DataError("chat_template", None, what, "fix it") from error
    return ChatTemplate(template, types.MappingProxyType({**special_tokens, **options}))


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """The text of a chat.

    Attributes:
      text: what the template makes of all messages.
      spans: the characters of each turn that is trained on, [begin, end).
      last_turn_only: the template does not nest, and earlier turns are left out of `spans`.
    """

    text: str
    spans: tuple[Span, ...]
    last_turn_only: bool


def render(
    chat: records.Chat, template: ChatTemplate, *, unnested_template: UnnestedTemplate
) -> RenderedChat:
    """Renders `chat` and finds the assistant turns in it.

    Args:
      chat: the conversation.
      template: its template.
      unnested_template: what to do when a turn's text changes as later messages follow (some
        templates drop earlier reasoning): "raise", or train on the "last_turn" alone.
    """
    text = template.render(
        chat.messages, tools=chat.tools, add_generation_prompt=False, where=chat.where
    )
    turns = [index for index, trained in enumerate(chat.train) if trained]
    spans = [_span(chat, template, text, turn) for turn in turns]
    nested = tuple(span for span in spans if span is not None)
    if len(nested) == len(turns):
        return RenderedChat(text, nested, last_turn_only=False)
    if unnested_template == "raise":
        raise _unnested_error(
            chat,
            turns[spans.index(None)],
            "set data.unnested_template='last_turn' to train on the last assistant turn only",
        )
    assistants = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if turns[-1] != assistants[-1]:
        return RenderedChat(text, (), last_turn_only=True)
    if spans[-1] is None:
        raise _unnested_error(chat, turns[-1], "remove the row, or use another template")
    return RenderedChat(text, (spans[-1],), last_turn_only=True)


def _span(chat: records.Chat, template: ChatTemplate, text: str, turn: int) -> Span | None:
    """The characters that the model writes in message `turn`; None if the prefixes do not nest."""
    before = template.render(
        chat.messages[:turn], tools=chat.tools, add_generation_prompt=True, where=chat.where
    )
    after = template.render(
        chat.messages[: turn + 1], tools=chat.tools, add_generation_prompt=False, where=chat.where
    )
    if after.startswith(before) and text.startswith(after):
        return len(before), len(after)
    return None


def _unnested_error(chat: records.Chat, turn: int, remedy: str) -> errors.DataError:
    return errors.DataError(
        chat.where,
        chat.messages[turn].get("content"),
        f"the chat template renders message {turn} or those before it differently once more "
        "messages follow, so the text that the model writes there cannot be told apart",
        remedy,
    )


def spans_mask(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens, given by their character `offsets` [n, 2], begin inside one of the `spans`."""
    begins = offsets[:, 0]
    mask = np.zeros(len(begins), np.bool_)
    for begin, end in spans:
        mask |= (begin <= begins) & (begins < end)
    return mask


def ends_in(text: str, span: Span, encoding: tokenizer.Encoding, end_ids: Sequence[int]) -> bool:
    """Whether the last token of `span` that is not white space is one of `end_ids`."""
    inside = np.flatnonzero(spans_mask(encoding.offsets, [span]))
    for index in inside[::-1]:
        begin, end = encoding.offsets[index]
        if text[begin:end].strip():
            return int(encoding.ids[index]) in end_ids
    return False


def _template_line(error: BaseException) -> int | str:
    """The line of the template in which `error` arose; Jinja puts it into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return lines[-1] if lines and lines[-1] is not None else "?"


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, with which some templates mark the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML and sorts the keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
