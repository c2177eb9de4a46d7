"""Writes continuations of prompts: a library, and the command

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
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from purelora import cli, compilation, errors, placing, sampling, speaker
from purelora import tree as trees
from purelora.data import records
from purelora.io import files, output
from purelora.io import tokenizer as tokenizers
from purelora.models import causal_lm

# Prompts and caches are padded to this, doubled as often as need be: few shapes are compiled.
_LEAST_BUCKET = 32
# Stands for a token where the logits are not finite.
_UNSOUND = -1


# ---- tokens ------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What one step hands to the next.

    Attributes:
      tokens_B: the newest token of each row.
      positions_B: the position of that token.
      made: how many tokens each row has got.
      keys_B: the random key of each row.
    """

    tokens_B: jax.Array
    positions_B: jax.Array
    made: jax.Array
    keys_B: jax.Array


def stream(
    model: causal_lm.CausalLM,
    trainable: trees.Tree,
    base: trees.Tree,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: Sequence[int],
    max_new_tokens: int,
    dtype: Any,
    how: sampling.Sampling = sampling.GREEDY,
    seed: int = 0,
    first_row: int = 0,
) -> Iterator[list[int | None]]:
    """Continues prompts together, one token of each at a time.

    Args:
      model: the declarations, with the targets of the adapter.
      trainable: the leaves of the adapter (or all weights).
      base: the frozen weights.
      prompts: token ids, at least one a prompt.
      end_ids: tokens that end a continuation; the end token is the last of its row.
      max_new_tokens: the largest number of tokens of a continuation.
      dtype: dtype of the computation.
      how: how tokens are chosen.
      seed: seeds the draws.
      first_row: number of the first prompt: with `seed` it decides the draws of a row.

    Yields:
      The next token of each prompt, None once it has ended.

    Raises:
      ModelError: the logits of a prompt that goes on are not finite.
    """
    tokens, lengths = _padded(prompts)
    numbers = np.arange(first_row, first_row + len(prompts), dtype=np.int32)
    static = _Static(model, how, np.dtype(dtype))
    slots = _bucket(tokens.shape[1] + max_new_tokens)
    state, cache = _begin(
        trainable, base, tokens, lengths, numbers, np.uint32(seed), static=static, slots=slots
    )
    is_over = np.zeros(len(prompts), bool)
    for left in reversed(range(max_new_tokens)):
        found = placing.on_host(state.tokens_B)
        _check_sound(found[~is_over])
        yield [None if over else int(t) for over, t in zip(is_over, found, strict=True)]
        is_over |= np.isin(found, end_ids)
        if is_over.all() or not left:
            return
        state, cache = _advance(trainable, base, state, cache, static=static)


def _check_sound(tokens: np.ndarray) -> None:
    if (tokens == _UNSOUND).any():
        remedy = "is an adapter or a weight damaged, or far too large?"
        raise errors.ModelError("logits", None, "are not finite numbers", remedy)


def complete(
    model: causal_lm.CausalLM,
    trainable: trees.Tree,
    base: trees.Tree,
    prompts: Sequence[Sequence[int]],
    **options: Any,
) -> list[list[int]]:
    """All new tokens of each prompt, the end token included; for the options see `stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, trainable, base, prompts, **options):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows `[B, T]` with zeros behind them, and their lengths `[B]`."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), _bucket(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _bucket(length: int) -> int:
    bucket = _LEAST_BUCKET
    while bucket < length:
        bucket *= 2
    return bucket


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a step is compiled for, besides shapes."""

    model: causal_lm.CausalLM
    how: sampling.Sampling
    dtype: np.dtype


@functools.partial(jax.jit, static_argnames=("static", "slots"))
def _begin(
    trainable: trees.Tree,
    base: trees.Tree,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    numbers_B: jax.Array,
    seed: jax.Array,
    *,
    static: _Static,
    slots: int,
) -> tuple[_Rows, Any]:
    """Reads the prompts into a new cache of `slots` and chooses the first tokens."""
    model, rows = static.model, tokens_BT.shape[0]
    bound = model.bind(base, trainable)
    cache = model.empty_cache(rows, slots, static.dtype)
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    x_BTD, cache = model.hidden_cached(bound, tokens_BT, positions_BT, cache, dtype=static.dtype)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers_B)
    x_BD = x_BTD[jnp.arange(rows), lengths_B - 1]
    first_B = _pick(x_BD, bound, keys_B, jnp.int32(0), static)
    return _Rows(first_B, lengths_B, jnp.int32(1), keys_B), cache


@functools.partial(jax.jit, static_argnames="static", donate_argnames="cache")
def _advance(
    trainable: trees.Tree, base: trees.Tree, state: _Rows, cache: Any, *, static: _Static
) -> tuple[_Rows, Any]:
    """Reads one token of each row and chooses the next; the cache is written in place."""
    model = static.model
    bound = model.bind(base, trainable)
    # The prompt's padding lies in slots that the new tokens overwrite before they see them.
    x_BTD, cache = model.hidden_cached(
        bound,
        state.tokens_B[:, None],
        state.positions_B[:, None],
        cache,
        dtype=static.dtype,
    )
    next_B = _pick(x_BTD[:, 0], bound, state.keys_B, state.made, static)
    return _Rows(next_B, state.positions_B + 1, state.made + 1, state.keys_B), cache


def _pick(
    x_BD: jax.Array, bound: trees.Tree, keys_B: jax.Array, made: jax.Array, static: _Static
) -> jax.Array:
    # In float32: bfloat16 has ties among the largest of so many logits.
    logits_BV = static.model.head_logits(x_BD, bound, jnp.float32)
    is_sound_B = jnp.isfinite(logits_BV.max(axis=-1))  # The maximum of a NaN is one.
    return jnp.where(is_sound_B, sampling.pick(logits_BV, keys_B, made, static.how), _UNSOUND)


# ---- text --------------------------------------------------------------------------------------


class TextStream:
    """The text of tokens that come one by one, in pieces that later tokens do not change."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_ids: Sequence[int]):
        """`end_ids` have no text, whether or not they are special tokens."""
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._ids: list[int] = []
        self._given = ""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that it completes.

        A character whose bytes are in several tokens is replacement characters until the last one.
        """
        if token not in self._end_ids:
            self._ids.append(token)
        return self._more(self.text.rstrip("\N{REPLACEMENT CHARACTER}"))

    def finish(self) -> str:
        """The text that has not been returned yet, complete or not."""
        return self._more(self.text)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def _more(self, text: str) -> str:
        more = text[len(self._given) :]
        self._given += more
        return more


def speak(
    talker: speaker.Speaker,
    voice: speaker.Voice,
    prompts: Sequence[Sequence[int]],
    options: speaker.ModelOptions,
    *,
    first_row: int = 0,
    emit: Callable[[str], None] | None = None,
) -> list["Answer"]:
    """Answers prompts together; `emit` gets the text of the first one as it comes."""
    end_ids = talker.tokenizer.eos_ids
    streams = [TextStream(talker.tokenizer, end_ids) for _ in prompts]
    counts, last = np.zeros(len(prompts), int), [-1] * len(prompts)
    steps = stream(
        voice.model,
        voice.trainable,
        voice.base,
        prompts,
        end_ids=end_ids,
        max_new_tokens=options.max_new_tokens,
        dtype=talker.dtype,
        how=options.sampling,
        seed=options.seed,
        first_row=first_row,
    )
    for tokens in steps:
        for row, token in enumerate(tokens):
            if token is None:
                continue
            piece = streams[row].push(token)
            counts[row], last[row] = counts[row] + 1, token
            if emit and row == 0:
                emit(piece)
    if emit:
        emit(streams[0].finish())
    return [
        Answer(text.text, int(count), token in end_ids)
        for text, count, token in zip(streams, counts, last, strict=True)
    ]


class Answer(NamedTuple):
    """A finished answer.

    Attributes:
      text: without the end token.
      new_tokens: how many tokens were made, the end token included.
      ended: whether it ends by itself rather than at the limit.
    """

    text: str
    new_tokens: int
    ended: bool


# ---- the command -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options(speaker.ModelOptions):
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
        for name, given in (
            ("--system", self.system),
            ("--chat-template-kwargs", self.chat_template_kwargs or None),
        ):
            if self.raw and given is not None:
                what = "is part of a chat template, which --raw leaves out"
                yield errors.Problem(name, given, what, "leave one of them out")
        if self.output is not None and not self.output.endswith((".jsonl", ".txt")):
            what = "is neither a .jsonl nor a .txt file"
            yield errors.Problem("--output", self.output, what, "give one of these endings")


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
      where: the argument, or the file and line, that it comes from.
      given: the columns that say it, for the output.
      content: plain text, or messages.
    """

    where: str
    given: Mapping[str, Any]
    content: str | Sequence[speaker.Message]


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = cli.options(Options, argv)
    speaker.check(list(options.problems()))
    prompts = read_prompts(options)
    paths = speaker.adapter_paths(options.adapter)
    names = options.use or tuple(paths) or (speaker.BASE,)
    for name in names:
        if name not in (speaker.BASE, *paths):
            raise speaker.unknown_name("--use", name, [speaker.BASE, *paths])
    if options.output is not None:
        output.check_free(options.output)
    compilation.use_cache("default")
    talker = speaker.load_speaker(options, paths)
    ids = [
        talker.ids(p.content, where=p.where, max_new_tokens=options.max_new_tokens) for p in prompts
    ]
    with _writer(options, labelled=len(names) * len(prompts) > 1) as writer:
        for name in names:
            for start in range(0, len(prompts), options.batch_size):
                batch = slice(start, start + options.batch_size)
                writer.write_batch(talker, name, start, prompts[batch], ids[batch])
    return 0


def read_prompts(options: Options) -> list[Prompt]:
    """All prompts of the command line, then those of the file.

    Raises:
      DataError: a file or rows in it that cannot be used.
    """
    found = [_prompt("--prompt", text, options) for text in options.prompt]
    if options.prompts_file is None:
        return found
    path = options.prompts_file
    if not path.endswith((".txt", ".jsonl")):
        what = "is neither a .txt nor a .jsonl file"
        raise errors.DataError("--prompts-file", path, what, "give one of these endings")
    try:
        text = files.read_text(path).removeprefix("\ufeff")
    except errors.ModelError as error:
        raise errors.DataError.of(error.problems) from error
    problems: list[errors.Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            if line.strip():
                is_json = path.endswith(".jsonl")
                read = _json_prompt if is_json else _prompt
                found.append(read(where, line, options))
        except errors.DataError as error:
            problems += error.problems
    if problems:
        raise errors.DataError.of(errors.first(problems, path))
    return found


def _prompt(where: str, text: str, options: Options) -> Prompt:
    if options.raw:
        return Prompt(where, {"prompt": text}, text)
    user = {"role": "user", "content": text}
    return Prompt(where, {"prompt": text}, [*_system(options), user])


def _system(options: speaker.ModelOptions) -> list[speaker.Message]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _json_prompt(where: str, line: str, options: Options) -> Prompt:
    """A row with `prompt`, a string, or `messages`, a list of `role` and `content`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise errors.DataError(where, None, f"is not JSON: {error}", "correct it") from error
    given = row if isinstance(row, dict) else {}
    text, messages = given.get("prompt"), given.get("messages")
    if isinstance(text, str) and messages is None:
        return _prompt(where, text, options)
    if text is not None or not isinstance(messages, list) or not messages:
        what = "has not one of `prompt`, a string, and `messages`, a list"
        raise errors.DataError(where, row, what, 'write {"prompt": "..."}')
    for message in messages:
        if not _is_message(message):
            what = "is not an object with `role` and `content`, two strings"
            remedy = f"the roles are {', '.join(records.ROLES)}"
            raise errors.DataError(f"{where}: messages", message, what, remedy)
    if options.raw:
        what, remedy = "is for a chat template, which --raw leaves out", "give `prompt`"
        raise errors.DataError(f"{where}: messages", None, what, remedy)
    if options.system is not None and messages[0]["role"] == "system":
        what, remedy = "begins with a system message", "leave --system out"
        raise errors.DataError(f"{where}: messages", None, what, remedy)
    return Prompt(where, {"messages": messages}, [*_system(options), *messages])


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return message.get("role") in records.ROLES and isinstance(message.get("content"), str)


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Where answers go.

    Attributes:
      options: the command's arguments.
      file: the terminal, or a file.
      labelled: whether to say which answer it is.
    """

    options: Options
    file: TextIO
    labelled: bool

    def write_batch(
        self,
        talker: speaker.Speaker,
        name: str,
        start: int,
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
    ) -> None:
        """Answers some prompts, of which the first has the number `start`, and writes that."""
        streams = self.options.output is None and len(prompts) == 1
        if streams:
            self._label(name, start, prompts[0])
        answers = speak(
            talker,
            talker.voice(name),
            ids,
            self.options,
            first_row=start,
            emit=self._emit if streams else None,
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start):
            if self.options.output is not None and self.options.output.endswith(".jsonl"):
                row = {"adapter": name, **prompt.given, **answer._asdict()}
                self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
            elif streams:
                self._emit("\n")
            else:
                self._label(name, number, prompt)
                self._emit(f"{answer.text}\n")

    def _label(self, name: str, number: int, prompt: Prompt) -> None:
        if self.labelled:
            said = prompt.given.get("prompt") or prompt.given["messages"][-1]["content"]
            first_line = said.strip().partition("\n")[0]
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
        output.new_file(options.output) as partial,
        open(partial, "w", encoding="utf-8", newline="\n") as file,
    ):
        yield _Writer(options, file, labelled)
    speaker.say(f"wrote {options.output}")


if __name__ == "__main__":
    cli.run_command(main, __doc__)
