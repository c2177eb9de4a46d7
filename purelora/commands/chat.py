"""Talks to a model, with or without adapters.

    python -m purelora.chat --model=smollm2-135m
    python -m purelora.chat --model=smollm2-135m --adapter=runs/a --adapter=b=runs/b --use=b

--model, --hf-folder, --adapter, --system, --chat-template-kwargs, --max-new-tokens, --temperature,
--top-k, --top-p, --seed, --dtype, --qtype, --tile-size
                        as for `python -m purelora.generate`
--use=NAME              the adapter to begin with; the first one given unless said, or `base`

Lines from standard input are the user's turns, but for these:

/adapter NAME           goes on with another adapter, or with `base`; the history stays
/system TEXT            sets the system prompt (none without TEXT) and forgets the history
/reset                  forgets the history
/quit                   ends, as the end of the input does
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence

from purelora.config import command_line
from purelora.core import errors
from purelora.inference import generation, loaded_model
from purelora.training import compilation

COMMANDS = ("/adapter", "/system", "/reset", "/quit")


@dataclasses.dataclass(frozen=True)
class Options(loaded_model.ModelOptions):
    """The command's arguments; the text at the top of this module says what they do."""

    use: str | None = None


@dataclasses.dataclass(frozen=True)
class Talk:
    """A conversation so far.

    Attributes:
      variant: name of the adapter that answers, or `base`.
      system: the system prompt, None for none.
      turns: the messages of user and assistant.
    """

    variant: str
    system: str | None
    turns: tuple[loaded_model.Message, ...] = ()

    @property
    def messages(self) -> tuple[loaded_model.Message, ...]:
        """All messages, the system prompt first."""
        if self.system is None:
            return self.turns
        return ({"role": "system", "content": self.system}, *self.turns)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    loaded_model.check(list(options.problems()))
    paths = loaded_model.adapter_paths(options.adapter)
    names = [loaded_model.BASE, *paths]
    variant = options.use or (names[1] if paths else loaded_model.BASE)
    if variant not in names:
        raise loaded_model.unknown_name("--use", variant, names)
    compilation.use_cache("default")
    loaded = loaded_model.load_model(options, paths)
    if loaded.template is None:
        what, remedy = "has no chat template", "use python -m purelora.generate --raw"
        raise errors.ModelError(options.model, None, what, remedy)
    loaded_model.say(f"{variant} answers; there are {', '.join(names)}. {', '.join(COMMANDS)}")
    talk = Talk(variant, options.system)
    for line in _lines():
        if line == "/quit":
            break
        try:
            if line.startswith("/"):
                talk = obey(line, talk, names)
            elif line:
                talk = answer(line, talk, loaded, options)
        except errors.UserError as error:
            # The turn is dropped, and the conversation is what it was.
            for problem in error.problems:
                loaded_model.say(str(problem))
        except KeyboardInterrupt:
            loaded_model.say("\ninterrupted: this turn is forgotten")
    return 0


def _lines() -> Iterator[str]:
    """Yields the lines of standard input, with a prompt if that is a terminal."""
    while True:
        try:
            # `input` brings line editing, and writes its prompt to stdout.
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        if not line and not sys.stdin.isatty():
            return
        yield line.strip()


def obey(line: str, talk: Talk, variants: Sequence[str]) -> Talk:
    """Carries out one of `COMMANDS`; returns the conversation after it.

    Raises:
      ConfigError: there is no such command or adapter.
    """
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/adapter":
        if rest not in variants:
            raise loaded_model.unknown_name("/adapter", rest, variants)
        loaded_model.say(f"{rest} answers")
        return dataclasses.replace(talk, variant=rest)
    if command == "/system":
        return Talk(talk.variant, rest or None)
    if command == "/reset":
        return Talk(talk.variant, talk.system)
    remedy = errors.nearest(command, COMMANDS)
    raise errors.ConfigError(command, None, "is not a command", remedy)


def answer(line: str, talk: Talk, loaded: loaded_model.LoadedModel, options: Options) -> Talk:
    """Prints the answer to a user's turn as it is generated; returns the longer conversation.

    Raises:
      DataError: the template fails, or the conversation has become too long.
    """
    asked = dataclasses.replace(talk, turns=(*talk.turns, {"role": "user", "content": line}))
    ids = loaded.ids(
        asked.messages, where="the conversation", max_new_tokens=options.max_new_tokens
    )
    variant = loaded.variant(talk.variant)
    answers = generation.answer(
        loaded, variant, [ids], options, first_row=len(talk.turns), emit=_emit
    )
    _emit("\n")
    turn = {"role": "assistant", "content": answers[0].text}
    return dataclasses.replace(asked, turns=(*asked.turns, turn))


def _emit(text: str) -> None:
    print(text, end="", flush=True)
