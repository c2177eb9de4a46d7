"""Reads data files into records: every row becomes a `Text` or a `Chat`.

A `.jsonl` file has one object a line, a `.json` file one list of objects. The shape of a row is
found from its keys, row by row:

    {"text": ...}                                   -> Text
    {"messages": [{"role", "content"}, ...]}        -> Chat
    {"conversations": [{"from", "value"}, ...]}     -> Chat
    {"prompt": ..., "completion": ...}              -> Chat (two strings, or two lists of messages)
    {"question": ..., "answer": ...}                -> Chat
    {"instruction": ..., "input"?, "output": ...}   -> Chat

A chat shape may also have `system` (a system prompt) and `tools` (a list, or a JSON string of one).
A message may have `train`: assistant messages train unless they say `false`; no other message can.
The messages of a `prompt` list are context: they do not train. Other columns are ignored.
"""

import dataclasses
import difflib
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from purelora.core import errors
from purelora.data import json_rows

ROLES = ("system", "developer", "user", "assistant", "tool")

_SHAPES: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "instruction": ("instruction", "output"),
}
_KEYS = tuple(key for keys in _SHAPES.values() for key in keys)
_FROM_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_JSON_TYPES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class Text:
    """A plain document. `where` is its file and line."""

    where: str
    text: str

    @property
    def shape(self) -> str:
        return "text"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
      where: its file and line.
      shape: the row shape it came from, a key of the table at the top of this module.
      messages: what a chat template reads: `role`, `content` and any other key of the message.
      train: for each message, whether its tokens are trained on.
      tools: tool descriptions for the template, or None.
    """

    where: str
    shape: str
    messages: tuple[dict[str, Any], ...]
    train: tuple[bool, ...]
    tools: tuple[Any, ...] | None = None


Record = Text | Chat


def of_rows(rows: Iterable[Mapping[str, Any]], where: str = "records") -> list[Record]:
    """The records of rows in memory, of the shapes above; all problems in one DataError."""
    problems: list[errors.Problem] = []
    records: list[Record] = []
    for number, row in enumerate(rows):
        try:
            records.append(_record(row, f"{where}[{number}]"))
        except errors.DataError as error:
            problems.extend(error.problems)
    if problems:
        raise errors.DataError.of(errors.first(problems, where))
    if not records:
        raise errors.DataError(where, None, "holds no records", "add at least one row")
    return records


def read(path: pathlib.Path) -> list[Record]:
    """Reads all records of a `.jsonl` or `.json` file, or reports all its problems at once."""
    problems: list[errors.Problem] = []
    records: list[Record] = []
    for line, row in json_rows.rows_of(path, problems):
        try:
            records.append(_record(row, f"{path}:{line}"))
        except errors.DataError as error:
            problems.extend(error.problems)
    if problems:
        raise errors.DataError.of(errors.first(problems, str(path)))
    if not records:
        raise errors.DataError(str(path), None, "holds no records", "add at least one row")
    return records


def _record(row: object, where: str) -> Record:
    if not isinstance(row, dict):
        raise _wrong_type(where, row, "an object", 'write a row as {"messages": [...]}')
    shape = _shape(row, where)
    for key in ("train", "weight"):
        if key in row:
            remedy = 'write "train" into the messages, leave the row out, or rename the column'
            raise errors.DataError(f"{where}: {key}", row[key], "is read in messages only", remedy)
    if shape == "text":
        return Text(where, _string(row["text"], f"{where}: text"))
    messages, train = _conversation(row, shape, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise errors.DataError(
            f"{where}: {_SHAPES[shape][-1]}",
            [message["role"] for message in messages],
            "has no assistant message",
            "add the answer that is to be learned, or remove the row",
        )
    return Chat(where, shape, tuple(messages), tuple(train), _tools(row.get("tools"), where))


def _shape(row: dict[str, Any], where: str) -> str:
    """The name in `_SHAPES` of the columns of `row`; null columns count only if no others fit."""
    filled = {key for key, value in row.items() if value is not None}
    complete = [name for name, keys in _SHAPES.items() if filled.issuperset(keys)]
    if not complete:
        complete = [name for name, keys in _SHAPES.items() if row.keys() >= set(keys)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        keys = [" + ".join(_SHAPES[name]) for name in complete]
        raise errors.DataError(
            where, sorted(row), "fits several shapes: " + " and ".join(keys), "keep one of them"
        )
    raise errors.DataError(where, sorted(row), *_unknown_shape(row))


def _unknown_shape(row: dict[str, Any]) -> tuple[str, str]:
    """What is wrong with a row that has no shape, and the remedy."""
    shapes = "known: " + ", ".join(" + ".join(keys) for keys in _SHAPES.values())
    for keys in _SHAPES.values():
        absent = [key for key in keys if key not in row]
        if len(absent) < len(keys):
            present = next(key for key in keys if key in row)
            return f"has {present!r} but no {absent[0]!r}", f"rename or add it; {shapes}"
    for key in row:
        if near := difflib.get_close_matches(key, _KEYS, n=1):
            return "has no known shape", f"{key!r}: did you mean {near[0]!r}? {shapes}"
    return "has no known shape", shapes


def _conversation(
    row: dict[str, Any], shape: str, where: str
) -> tuple[list[dict[str, Any]], list[bool]]:
    """The messages of a row of any chat shape, and which of them train."""
    if shape in ("messages", "conversations"):
        messages, train = _messages(row[shape], f"{where}: {shape}")
    elif shape == "prompt" and isinstance(row["prompt"], list):
        context, _ = _messages(row["prompt"], f"{where}: prompt")
        answer, trained = _messages(row["completion"], f"{where}: completion")
        messages, train = context + answer, [False] * len(context) + trained
    else:
        question, answer_key = _SHAPES[shape]
        asked = _string(row[question], f"{where}: {question}")
        if shape == "instruction" and row.get("input"):
            asked += "\n\n" + _string(row["input"], f"{where}: input")
        answer_text = _string(row[answer_key], f"{where}: {answer_key}")
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer_text},
        ]
        train = [False, True]
    if row.get("system") is not None:
        messages = [_system_message(row["system"], messages, f"{where}: system"), *messages]
        train = [False, *train]
    return messages, train


def _system_message(value: object, messages: list[dict[str, Any]], where: str) -> dict[str, Any]:
    if any(message["role"] == "system" for message in messages):
        raise errors.DataError(
            where, value, "is given beside a system message", "keep one of the two"
        )
    return {"role": "system", "content": _string(value, where)}


def _messages(value: object, where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    if not isinstance(value, list):
        raise _wrong_type(where, value, "a list of messages", "write [{...}, ...]")
    pairs = [_message(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return [message for message, _ in pairs], [trained for _, trained in pairs]


def _message(value: object, where: str) -> tuple[dict[str, Any], bool]:
    """One message as a template reads it, and whether it trains."""
    if not isinstance(value, dict):
        raise _wrong_type(where, value, "an object", 'write {"role": ..., "content": ...}')
    message = _from_value(value, where) if "from" in value else dict(value)
    if "role" not in message:
        raise errors.DataError(where, value, "has no 'role'", "add it: " + ", ".join(ROLES))
    role = message["role"]
    if role not in ROLES:
        remedy = errors.nearest(str(role), ROLES)
        raise errors.DataError(f"{where}.role", role, "is no known role", remedy)
    if "weight" in message:
        # How other tools leave a message out: obeyed in silence, or not at all, would train wrong.
        raise errors.DataError(
            f"{where}.weight", message["weight"], "is not read", 'write "train": true or false'
        )
    train = message.pop("train", role == "assistant")
    if not isinstance(train, bool):
        raise _wrong_type(f"{where}.train", train, "a boolean", "write true or false")
    if train and role != "assistant":
        raise errors.DataError(
            f"{where}.train", train, f"a {role} message cannot train", "remove the key"
        )
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if not (calls and message.get("content") is None):
        message["content"] = _content(message.get("content"), f"{where}.content")
    return message, train


def _from_value(value: dict[str, Any], where: str) -> dict[str, Any]:
    """A message with the keys `from` and `value`, as one with `role` and `content`."""
    sender = value["from"]
    if not isinstance(sender, str) or sender not in _FROM_ROLES:
        remedy = errors.nearest(str(sender), tuple(_FROM_ROLES))
        raise errors.DataError(f"{where}.from", sender, "is no known role", remedy)
    if "value" not in value:
        raise errors.DataError(where, value, "has 'from' but no 'value'", "add its text")
    rest = {key: item for key, item in value.items() if key not in ("from", "value")}
    return {"role": _FROM_ROLES[sender], "content": value["value"], **rest}


def _content(value: object, where: str) -> str:
    """The text of a message: a string, or a list of text parts, which are joined."""
    if not isinstance(value, list):
        return _string(value, where)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise errors.DataError(
                f"{where}[{index}]", part, "is no text part", 'write {"type": "text", "text": ...}'
            )
        texts.append(_string(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _tools(value: object, where: str) -> tuple[Any, ...] | None:
    if isinstance(value, str):
        text = value
        try:
            value = json_rows.DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise errors.DataError.of(
                [json_rows.invalid_json(f"{where}: tools", text, error)]
            ) from error
    if value is None:
        return None
    if not isinstance(value, list):
        raise _wrong_type(f"{where}: tools", value, "a list", "write a list, or the JSON of one")
    return tuple(value) or None


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type(where, value, "a string", "write a string, or remove the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise errors.DataError(
            where, value, f"has half a surrogate pair at character {error.start}", "remove it"
        ) from error
    return value


def _wrong_type(where: str, value: object, wanted: str, remedy: str) -> errors.DataError:
    json_type = _JSON_TYPES[type(value)]
    return errors.DataError(where, value, f"is {json_type}, where {wanted} should be", remedy)
