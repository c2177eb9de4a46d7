"""Prompts from texts and files: plain text, or chats for the model's template."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from purelora.core import errors
from purelora.data import records
from purelora.formats import files
from purelora.inference import loaded_model


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
      where: the argument, or the file and line, that it comes from.
      columns: the columns of its row, for the output.
      content: plain text, or messages.
    """

    where: str
    columns: Mapping[str, Any]
    content: str | Sequence[loaded_model.Message]


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """Makes prompts of texts and rows.

    Attributes:
      raw: take a text as it is, without the chat template.
      system: the system prompt; None for none.
    """

    raw: bool = False
    system: str | None = None

    def file(self, path: str) -> list[Prompt]:
        """The prompts of a file: .txt, a prompt a line; .jsonl, a row a line.

        Raises:
          DataError: the file or rows in it cannot be used; all problems in one error.
        """
        if not path.endswith((".txt", ".jsonl")):
            what = "is neither a .txt nor a .jsonl file"
            raise errors.DataError("--prompts-file", path, what, "give one of these endings")
        try:
            text = files.read_text(path).removeprefix("\ufeff")
        except errors.ModelError as error:
            raise errors.DataError.of(error.problems) from error
        read_line = self.row if path.endswith(".jsonl") else self.text
        prompts: list[Prompt] = []
        problems: list[errors.Problem] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    prompts.append(read_line(f"{path}:{number}", line))
                except errors.DataError as error:
                    problems += error.problems
        if problems:
            raise errors.DataError.of(errors.first(problems, path))
        return prompts

    def text(self, where: str, text: str) -> Prompt:
        """A text: as it is if `raw`, otherwise as the user's turn."""
        if self.raw:
            return Prompt(where, {"prompt": text}, text)
        user = {"role": "user", "content": text}
        return Prompt(where, {"prompt": text}, [*self._system_messages, user])

    def row(self, where: str, line: str) -> Prompt:
        """A JSON object with `prompt`, a string, or `messages`, a list of `role` and `content`.

        Raises:
          DataError: the line is something else, or has messages and they are not wanted.
        """
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise errors.DataError(where, None, f"is not JSON: {error}", "correct it") from error
        columns = row if isinstance(row, dict) else {}
        text, messages = columns.get("prompt"), columns.get("messages")
        if isinstance(text, str) and messages is None:
            return self.text(where, text)
        if text is not None or not isinstance(messages, list) or not messages:
            what = "has not one of `prompt`, a string, and `messages`, a list"
            raise errors.DataError(where, row, what, 'write {"prompt": "..."}')
        for message in messages:
            if not _is_message(message):
                what = "is not an object with `role` and `content`, two strings"
                remedy = f"the roles are {', '.join(records.ROLES)}"
                raise errors.DataError(f"{where}: messages", message, what, remedy)
        if self.raw:
            what, remedy = "is for a chat template, which --raw leaves out", "give `prompt`"
            raise errors.DataError(f"{where}: messages", None, what, remedy)
        if self.system is not None and messages[0]["role"] == "system":
            what, remedy = "begins with a system message", "leave --system out"
            raise errors.DataError(f"{where}: messages", None, what, remedy)
        return Prompt(where, {"messages": messages}, [*self._system_messages, *messages])

    @property
    def _system_messages(self) -> list[loaded_model.Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return message.get("role") in records.ROLES and isinstance(message.get("content"), str)
