"""Writes continuations of prompts.

    python -m purelora.generate --model=smollm2-135m --prompt="Who are you?"
    python -m purelora.generate --model=smollm2-135m --adapter=runs/a --adapter=b=runs/b/peft \\
        --prompts-file=prompts.jsonl --output=answers.jsonl --batch-size=8

--model=MODEL           as model.path: a built-in name, a Hugging Face folder, a GGUF file, a run
                        that trained all weights or holds its base (checkpoint.save_base), or a
                        MaxText checkpoint
--hf-folder=PATH        for a MaxText checkpoint: the folder of its config.json and tokenizer
--adapter=[NAME=]PATH   a run's folder, a step's folder, a PEFT folder or a MaxText checkpoint; may
                        be given several times
--use=NAME              which to run, several times if need be; `base` is the model without adapter.
                        Without it: all adapters given, one after the other
--prompt=TEXT           a user's turn; may be given several times
--prompts-file=FILE     .txt, a prompt a line; or .jsonl with `prompt` or `messages`
--system=TEXT           a system prompt
--chat-template-kwargs=DICT   further variables of the chat template: {"enable_thinking": False}
--raw                   prompts as they are, without the chat template
--max-new-tokens=N      the largest number of tokens of an answer (256)
--temperature=T         0 takes the most probable token (the default)
--top-k=K, --top-p=P    draw from the K largest, or from those that have probability P together
--seed=N                seeds the draws, which depend on it and on the prompt's number alone (0)
--dtype=TYPE            float32 (the default) or bfloat16, of weights and computation
--qtype=TYPE            int8, int4, nf4 or fp8: quantise the base (but the embedding)
--tile-size=N           inputs that share a scale; without it, one scale per output channel
--batch-size=N          prompts that run together (1, which prints tokens as they come)
--output=FILE           a new .jsonl or .txt file, instead of the terminal

Runs on one device.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from purelora.config import command_line
from purelora.core import errors
from purelora.formats import atomic_output
from purelora.inference import generation, loaded_model
from purelora.inference.prompts import Prompt, PromptReader
from purelora.training import compilation


@dataclasses.dataclass(frozen=True)
class Options(loaded_model.ModelOptions):
    """The command's arguments; the text at the top of this module says what they do."""

    use: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()
    prompts_file: str | None = None
    raw: bool = False
    batch_size: int = 1
    output: str | None = None

    def problems(self) -> Iterator[errors.Problem]:
        """Values out of range, and arguments that do not go together."""
        yield from super().problems()
        if self.batch_size < 1:
            yield errors.Problem("--batch-size", self.batch_size, "must be at least 1", "")
        if not self.prompt and self.prompts_file is None:
            remedy = "give --prompt=TEXT, or --prompts-file=FILE"
            yield errors.Problem("--prompt", None, "is missing", remedy)
        for name, value in (
            ("--system", self.system),
            ("--chat-template-kwargs", self.chat_template_kwargs or None),
        ):
            if self.raw and value is not None:
                what = "is part of a chat template, which --raw leaves out"
                yield errors.Problem(name, value, what, "leave one of them out")
        if self.output is not None and not self.output.endswith((".jsonl", ".txt")):
            what = "is neither a .jsonl nor a .txt file"
            yield errors.Problem("--output", self.output, what, "give one of these endings")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    loaded_model.check(list(options.problems()))
    prompts = read_prompts(options)
    paths = loaded_model.adapter_paths(options.adapter)
    names = options.use or tuple(paths) or (loaded_model.BASE,)
    for name in names:
        if name not in (loaded_model.BASE, *paths):
            raise loaded_model.unknown_name("--use", name, [loaded_model.BASE, *paths])
    if options.output is not None:
        atomic_output.check_free(options.output)
    compilation.use_cache("default")
    loaded = loaded_model.load_model(options, paths)
    ids = [
        loaded.ids(p.content, where=p.where, max_new_tokens=options.max_new_tokens) for p in prompts
    ]
    with _writer(options, labelled=len(names) * len(prompts) > 1) as writer:
        for name in names:
            for start in range(0, len(prompts), options.batch_size):
                batch = slice(start, start + options.batch_size)
                writer.write_batch(loaded, name, start, prompts[batch], ids[batch])
    return 0


def read_prompts(options: Options) -> list[Prompt]:
    """All prompts of the command line, then those of the file.

    Raises:
      DataError: a file or rows in it that cannot be used.
    """
    reader = PromptReader(options.raw, options.system)
    texts = [reader.text("--prompt", text) for text in options.prompt]
    return texts + ([] if options.prompts_file is None else reader.file(options.prompts_file))


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Writes answers to the terminal or a file.

    Attributes:
      options: the command's arguments.
      file: the terminal, or a file.
      labelled: whether adapter and prompt are named above each answer.
    """

    options: Options
    file: TextIO
    labelled: bool

    def write_batch(
        self,
        loaded: loaded_model.LoadedModel,
        name: str,
        start: int,
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
    ) -> None:
        """Generates the answers to some prompts, numbered from `start`, and writes them."""
        streams = self.options.output is None and len(prompts) == 1
        if streams:
            self._label(name, start, prompts[0])
        answers = generation.answer(
            loaded,
            loaded.variant(name),
            ids,
            self.options,
            first_row=start,
            emit=self._emit if streams else None,
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start):
            if self.options.output is not None and self.options.output.endswith(".jsonl"):
                row = {"adapter": name, **prompt.columns, **answer._asdict()}
                self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
            elif streams:
                self._emit("\n")
            else:
                self._label(name, number, prompt)
                self._emit(f"{answer.text}\n")

    def _label(self, name: str, number: int, prompt: Prompt) -> None:
        if self.labelled:
            turn = prompt.columns.get("prompt") or prompt.columns["messages"][-1]["content"]
            first_line = turn.strip().partition("\n")[0]
            self._emit(f"--- {name}, prompt {number + 1}: {first_line[:60]}\n")

    def _emit(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


@contextlib.contextmanager
def _writer(options: Options, *, labelled: bool) -> Iterator[_Writer]:
    """The terminal, or a file that gets its name once all answers are in it."""
    if options.output is None:
        yield _Writer(options, sys.stdout, labelled)
        return
    with (
        atomic_output.new_file(options.output) as partial,
        open(partial, "w", encoding="utf-8", newline="\n") as file,
    ):
        yield _Writer(options, file, labelled)
    loaded_model.say(f"wrote {options.output}")
