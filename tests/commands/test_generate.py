"""The commands `generate` and `chat`, from their arguments to their text."""

import dataclasses
import functools
import io
import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from purelora.commands import chat, generate
from purelora.core import errors
from purelora.formats import source
from purelora.inference import generation, loaded_model
from purelora.interop import builtin
from purelora.interop.peft import adapter_config, adapter_sources, artefact, attach
from purelora.interop.peft import files as peft_files
from purelora.models import causal_lm, decode
from purelora.training import compilation
from purelora.weights import load as weights_load
from purelora.weights import random_weights
from tests.support import runs

REPO = pathlib.Path(__file__).parents[2]
CONFIG = builtin.tiny().source.config


@functools.cache
def tiny_model(dtype: str) -> causal_lm.CausalLM:
    return causal_lm.from_hf(CONFIG, "tiny", dtype=dtype)


@functools.cache
def tiny_opened() -> builtin.Model:
    """The tiny model with weights so large that it does not just repeat its last token."""
    arrays = {
        name: array * 20 if array.ndim == 2 else array
        for name, array in random_weights.drawn(CONFIG, seed=0).items()
    }
    return builtin.Model(source.ArraySource("tiny", CONFIG, arrays), builtin.tiny().tokenizer)


@pytest.fixture(autouse=True)
def _one_model(monkeypatch):
    """One model object in all tests, so that it is compiled for once; no compilation cache."""
    tiny_model("float32"), tiny_model("bfloat16")  # Before `from_hf` is replaced.
    monkeypatch.setattr(causal_lm, "from_hf", lambda config, where, dtype: tiny_model(dtype))
    opened, real = tiny_opened(), builtin.open_model
    monkeypatch.setattr(
        builtin, "open_model", lambda path, **k: opened if path == "tiny" else real(path, **k)
    )
    monkeypatch.setattr(compilation, "use_cache", lambda folder: None)


def write_adapter(folder: pathlib.Path, seed: int, **changes) -> str:
    """A PEFT folder that changes what the tiny model says."""
    rng = np.random.default_rng(seed)
    width, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    modules = {
        f"model.layers.{i}.self_attn.{name}": {
            "lora_A": rng.standard_normal((2, width)).astype(np.float32),
            "lora_B": rng.standard_normal((rows, 2)).astype(np.float32),
        }
        for i in range(CONFIG["num_hidden_layers"])
        for name, rows in (("q_proj", width), ("v_proj", width // 2))
    }
    settings = adapter_config.AdapterConfig(
        r=2, lora_alpha=4, target_modules=("q_proj", "v_proj"), **changes
    )
    if "ensure_weight_tying" in changes:
        weight = rng.standard_normal((vocab, width)).astype(np.float32)
        modules["model.embed_tokens"] = {"weight": weight}
    peft_files.write(str(folder), artefact.Adapter("made", settings, modules, None))
    return str(folder)


def run(capsys, *arguments: str) -> str:
    """Standard output of the command on the tiny model, few tokens."""
    assert generate.main(["--model=tiny", "--max-new-tokens=6", *arguments]) == 0
    return capsys.readouterr().out


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def library_answer(prompt: str, adapter: str | None = None, count: int = 6) -> str:
    """The answer by the library, one whole call."""
    opened, model = tiny_opened(), tiny_model("float32")
    options = loaded_model.ModelOptions("tiny")
    base = loaded_model.load_model(options, {}).variant("base").base
    trainable = {}
    if adapter:
        one = attach.attach(adapter_sources.open_adapter(adapter), model, base_fingerprint=None)
        model, trainable = one.model, one.trainable
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = opened.tokenizer.encode(text, add_special_tokens=True).ids
    found = decode.complete(
        model, trainable, base, [ids], end_ids=opened.tokenizer.eos_ids, max_new_tokens=count,
        dtype=jnp.float32,
    )[0]  # fmt: skip
    return opened.tokenizer.decode(found, skip_special_tokens=True)


def test_one_prompt_prints_its_answer_alone(capsys):
    assert run(capsys, "--prompt=Hello") == library_answer("Hello") + "\n"


def test_several_prompts_are_labelled_and_batches_change_nothing(capsys):
    prompts = ["--prompt=Hello", "--prompt=A longer prompt\nof two lines", "--prompt=x"]
    out = run(capsys, *prompts)
    want = [
        f"--- base, prompt {number}: {first}\n{library_answer(prompt)}\n"
        for number, first, prompt in (
            (1, "Hello", "Hello"),
            (2, "A longer prompt", "A longer prompt\nof two lines"),
            (3, "x", "x"),
        )
    ]
    assert out == "".join(want)
    for size in (2, 3, 8):
        assert run(capsys, *prompts, f"--batch-size={size}") == out


def test_draws_do_not_depend_on_the_batches(capsys):
    prompts = [f"--prompt={p}" for p in ("a", "b", "c", "c")]
    how = ["--temperature=2", "--top-k=50", "--top-p=0.95"]
    out = run(capsys, *prompts, *how, "--seed=1")
    for size in (2, 3):
        assert run(capsys, *prompts, *how, "--seed=1", f"--batch-size={size}") == out
    assert run(capsys, *prompts, *how, "--seed=2") != out
    third, fourth = out.split("--- ")[3:]
    assert third.partition("\n")[2] != fourth.partition("\n")[2]


def test_adapters_answer_one_after_the_other_over_one_base(capsys, tmp_path, monkeypatch):
    first, second = (write_adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2)))
    loads = []
    real = weights_load.load
    monkeypatch.setattr(weights_load, "load", lambda *a, **k: loads.append(1) or real(*a, **k))
    adapters = [f"--adapter={first}", f"--adapter=other={second}"]
    out = run(capsys, "--prompt=Hello", *adapters)
    answers = {
        "base": library_answer("Hello"),
        "a": library_answer("Hello", first),
        "other": library_answer("Hello", second),
    }
    loads_of_library = 3
    assert len(loads) == loads_of_library + 1
    assert len(set(answers.values())) == 3
    blocks = {name: f"--- {name}, prompt 1: Hello\n{text}\n" for name, text in answers.items()}
    assert out == blocks["a"] + blocks["other"]
    assert run(capsys, "--prompt=Hello", *adapters, "--use=base", "--use=other") == (
        blocks["base"] + blocks["other"]
    )
    assert run(capsys, "--prompt=Hello", *adapters, "--use=other") == answers["other"] + "\n"


def test_an_adapter_with_a_whole_table_replaces_that_of_the_base(capsys, tmp_path):
    folder = write_adapter(
        tmp_path / "a", 1, modules_to_save=("embed_tokens",), ensure_weight_tying=True
    )
    out = run(capsys, "--prompt=Hello", f"--adapter={folder}")
    assert out == library_answer("Hello", folder) + "\n"
    assert out != library_answer("Hello") + "\n"
    loaded = loaded_model.load_model(loaded_model.ModelOptions("tiny"), {"a": folder})
    assert "embed_tokens" in loaded.variant("base").base
    assert "weight" not in loaded.variant("a").base.get("embed_tokens", {})


def test_system_prompt_and_raw_text(capsys):
    loaded = loaded_model.load_model(loaded_model.ModelOptions("tiny"), {})
    variant = loaded.variant("base")

    def answer(text: str) -> str:
        ids = loaded.ids(text, where="x", max_new_tokens=6)
        options = loaded_model.ModelOptions("tiny", max_new_tokens=6)
        return generation.answer(loaded, variant, [ids], options)[0].text + "\n"

    assert run(capsys, "--prompt=Hello", "--raw") == answer("Hello")
    chatml = "<|im_start|>{}\n{}<|im_end|>\n"
    text = chatml.format("system", "Be brief.") + chatml.format("user", "Hello")
    assert run(capsys, "--prompt=Hello", "--system=Be brief.") == answer(
        text + "<|im_start|>assistant\n"
    )


def test_prompts_from_files_and_answers_as_rows(capsys, tmp_path):
    lines, table = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("Hello\n\nnaïve\r\n", "utf-8")
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "naïve"},
    ]
    given = [{"prompt": "Hello", "id": 7}, {"messages": turns}]
    table.write_text("".join(json.dumps(row) + "\n" for row in given), "utf-8")
    out = tmp_path / "out.jsonl"
    said = run(capsys, f"--prompts-file={lines}", "--prompt=first", f"--output={out}")
    assert said == ""
    found = rows(out)
    assert [row["prompt"] for row in found] == ["first", "Hello", "naïve"]
    assert [row["text"] for row in found] == [library_answer(row["prompt"]) for row in found]
    assert {row["adapter"] for row in found} == {"base"}
    assert [(row["new_tokens"], row["ended"]) for row in found] == [(6, False)] * 3

    other = tmp_path / "other.jsonl"
    run(capsys, f"--prompts-file={table}", f"--output={other}", "--batch-size=2")
    hello, chatted = rows(other)
    assert hello == found[1]
    assert chatted["messages"] == turns
    assert chatted["text"] != library_answer("naïve")
    text = tmp_path / "out.txt"
    run(capsys, f"--prompts-file={lines}", f"--output={text}")
    assert text.read_text("utf-8") == run(capsys, f"--prompts-file={lines}")


def test_an_answer_that_ends_by_itself_says_so(tmp_path, capsys, monkeypatch):
    every = tuple(range(CONFIG["vocab_size"]))
    with_tokenizer(monkeypatch, eos_ids=every)
    out = tmp_path / "out.jsonl"
    run(capsys, "--prompt=Hello", f"--output={out}")
    assert [(r["text"], r["new_tokens"], r["ended"]) for r in rows(out)] == [("", 1, True)]


def test_text_comes_token_by_token(capsys):
    loaded = loaded_model.load_model(loaded_model.ModelOptions("tiny"), {})
    ids = loaded.ids("Hello", where="x", max_new_tokens=6)
    options = loaded_model.ModelOptions("tiny", max_new_tokens=6)
    came: list[str] = []
    said = generation.answer(loaded, loaded.variant("base"), [ids], options, emit=came.append)
    assert len(came) == 6 + 1
    assert "".join(came) == said[0].text
    assert sum(map(bool, came)) > 1


@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4", "fp8"])
def test_quantised_bases_and_bfloat16_speak(capsys, qtype):
    out = run(capsys, "--prompt=Hello", f"--qtype={qtype}", "--tile-size=16", "--dtype=bfloat16")
    assert out.endswith("\n")
    loaded = loaded_model.load_model(loaded_model.ModelOptions("tiny", qtype=qtype), {})
    assert (
        loaded.variant("base").base["layers"]["mlp"]["up_proj"]["weight"].qvalue.dtype.itemsize == 1
    )


ONE = "--prompt=x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"^--prompt: is missing; give --prompt=TEXT, or --prompts-file=FILE"),
        ([ONE, "--temprature=1"], r"--temprature: .*; did you mean --temperature\?"),
        ([ONE, "--max-new-tokens=0"], r"^--max-new-tokens = 0: must be from 1 to"),
        ([ONE, "--batch-size=0"], r"^--batch-size = 0: must be at least 1"),
        ([ONE, "--temperature=-1"], r"^--temperature = -1.0: must be a number of at least 0"),
        ([ONE, "--temperature=nan"], r"^--temperature = nan: must be a number of at least 0"),
        ([ONE, "--temperature=1", "--top-p=0"], r"^--top-p = 0.0: must be above 0 and at most 1"),
        ([ONE, "--temperature=1", "--top-k=0"], r"^--top-k = 0: must be from 1 to"),
        ([ONE, "--seed=-1"], r"^--seed = -1: must be from 0 to"),
        ([ONE, "--top-p=0.5"], r"^--top-p = 0.5: has no effect with --temperature=0"),
        ([ONE, "--top-k=5"], r"^--top-k = 5: has no effect with --temperature=0"),
        ([ONE, "--tile-size=8"], r"^--tile-size = 8: has no effect with --qtype=none"),
        ([ONE, "--qtype=int8", "--tile-size=0"], r"^--tile-size = 0: must be from 1"),
        ([ONE, "--qtype=int8", "--tile-size=20"], r"^--tile-size = 20: layers.*does not divide"),
        ([ONE, "--qtype=nf4", "--tile-size=2"], r"^--tile-size = 2: layers.*nf4 keeps two codes"),
        ([ONE, "--qtype=int3"], r"^--qtype = 'int3': must be one of 'none', 'int8', 'int4'"),
        ([ONE, "--raw", "--system=x"], r"^--system = 'x': is part of a chat template"),
        ([ONE, "--raw", "--chat-template-kwargs={'x': True}"],
         r"^--chat-template-kwargs = {'x': True}: is part of a chat template"),
        ([ONE, "--chat-template-kwargs={'x': None}"],
         r"^--chat-template-kwargs = {'x': None}: must be a dict from names to True or False"),
        ([ONE, "--chat-template-kwargs={'tools': 1}"], r"kwargs = 'tools': is what the template"),
        ([ONE, "--output=x.csv"], r"^--output = 'x.csv': is neither a .jsonl nor a .txt file"),
        ([ONE, "--output=nonsuch/x.txt", "--use=x"], r"^--use = 'x': is no adapter; known: base"),
        ([ONE, "--adapter=a=x", "--use=b"], r"^--use = 'b': is no adapter; .*a"),
        ([ONE, "--adapter=x/a", "--adapter=y/a"], r"^--adapter = 'y/a': is a second 'a'; give it"),
        ([ONE, "--adapter=base=x"], r"^--adapter = 'base=x': is a second 'base'"),
        ([ONE, "--adapter=a="], r"^--adapter = 'a=': is not NAME=PATH or PATH"),
        ([ONE, "--adapter=nonsuch"], r"^nonsuch: is not a folder"),
        (["--prompt="], r"^--prompt = '': has no token"),
        ([ONE, "--max-new-tokens=2048"], r"^--prompt: has 20 tokens; with 2048 more that is beyond "
                                         r"the model's 2048 positions"),
        (["--prompts-file=x.csv"], r"^--prompts-file = 'x.csv': is neither a .txt nor a .jsonl"),
        (["--prompts-file=nonsuch.txt"], r"^nonsuch.txt: cannot be read"),
        ([ONE, "--model=nonsuch"], r"--model = 'nonsuch': is given more than once"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_clear_error(arguments, message):
    raw = ["--raw"] if "--prompt=" in arguments else []
    with pytest.raises(errors.UserError, match=message):
        generate.main(["--model=tiny", *arguments, *raw])


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(errors.ConfigError) as caught:
        generate.main(["--model=tiny", "--top-p=2", "--seed=-1", "--batch-size=0", "--output=x"])
    assert {p.where for p in caught.value.problems} == {
        "--top-p", "--seed", "--batch-size", "--output", "--prompt"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p.jsonl:2: is not JSON"),
        ("[1]", r"p.jsonl:2 = \[1\]: has not one of `prompt`, a string, and `messages`"),
        ('{"text": "x"}', r"p.jsonl:2.*has not one of"),
        ('{"prompt": 3}', r"p.jsonl:2.*has not one of"),
        ('{"prompt": "x", "messages": []}', r"p.jsonl:2.*has not one of"),
        ('{"messages": []}', r"p.jsonl:2.*has not one of"),
        ('{"messages": ["x"]}', r"p.jsonl:2: messages = 'x': is not an object with `role` and"),
        ('{"messages": [{"role": "me", "content": "x"}]}', r"p.jsonl:2: messages.*the roles are "),
        ('{"messages": [{"role": "user"}]}', r"p.jsonl:2: messages.*is not an object with"),
        ('{"messages": [{"role": "system", "content": "x"}]}', r"begins with a system message"),
    ],
)
def test_a_row_that_is_no_prompt(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n{{"prompt": 1}}\n')
    with pytest.raises(errors.DataError, match=message) as caught:
        generate.main(["--model=tiny", f"--prompts-file={path}", "--system=x"])
    assert len(caught.value.problems) == 2


def test_options_reach_the_chat_template(monkeypatch):
    template = "{{ messages[0].content }}{{ 'abc' if loud else '' }}"
    with_tokenizer(monkeypatch, chat_template=template)
    found = []
    for given in ({}, {"loud": True}):
        options = loaded_model.ModelOptions("tiny", chat_template_kwargs=given)
        loaded = loaded_model.load_model(options, {})
        messages = [{"role": "user", "content": "x"}]
        found.append(loaded.tokenizer.decode(loaded.ids(messages, where="", max_new_tokens=1)))
    assert found == ["x", "xabc"]


def test_messages_need_a_template(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(errors.DataError, match="which --raw leaves out; give `prompt`"):
        generate.main(["--model=tiny", f"--prompts-file={path}", "--raw"])


def with_tokenizer(monkeypatch, **changes) -> None:
    """The tiny model with another tokenizer."""
    opened = tiny_opened()
    changed = dataclasses.replace(
        opened, tokenizer=dataclasses.replace(opened.tokenizer, **changes)
    )
    monkeypatch.setattr(builtin, "open_model", lambda *a, **k: changed)


def test_a_model_without_template_takes_raw_text(capsys, monkeypatch):
    plain = run(capsys, "--prompt=Hello", "--raw")
    with_tokenizer(monkeypatch, chat_template=None)
    assert run(capsys, "--prompt=Hello", "--raw") == plain
    with pytest.raises(errors.DataError, match="--prompt: the model has no chat template; .*--raw"):
        run(capsys, "--prompt=Hello")


def test_the_output_appears_whole_or_not_at_all(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    with pytest.raises(errors.DataError):
        run(capsys, "--prompt=x", "--prompt=", "--raw", f"--output={out}")
    assert not list(tmp_path.iterdir())
    out.write_text("mine")
    with pytest.raises(errors.UserError, match="out.jsonl"):
        run(capsys, "--prompt=x", f"--output={out}")
    assert out.read_text() == "mine"


def test_an_adapter_of_another_base_is_refused(tmp_path, capsys):
    folder = write_adapter(tmp_path / "a", 1)
    adapter = peft_files.read(folder)
    other = artefact.Adapter("x", adapter.config, adapter.modules, "0" * 64)
    peft_files.write(str(tmp_path / "b"), other)
    with pytest.raises(errors.ModelError, match="was trained on another base"):
        run(capsys, "--prompt=x", f"--adapter={tmp_path / 'b'}")


def a_run(folder: pathlib.Path, *arguments: str) -> str:
    """A finished run of few steps of the tiny model."""
    options = (f"--config.workdir={folder}", "--config.steps=2", *arguments)
    assert runs.run(folder, *options) == 0
    return str(folder)


def test_a_run_is_a_model(capsys, tmp_path):
    """One that trained all weights, and one that holds its base, with its own adapter on top."""
    full = ("--config.lora.enabled=False", "--config.quant.qtype=none")
    whole = a_run(tmp_path / "whole", *full, "--config.optim.learning_rate=0.1")
    on_base = a_run(tmp_path / "lora", "--config.checkpoint.save_base=True")
    few = ["--max-new-tokens=6", "--prompt=Hello"]
    capsys.readouterr()
    said = {}
    for name, arguments in {
        "whole": [f"--model={whole}"],
        "base": [f"--model={on_base}"],
        "adapted": [f"--model={on_base}", f"--adapter={on_base}"],
    }.items():
        assert generate.main([*arguments, *few]) == 0
        said[name] = capsys.readouterr().out
    assert len({*said.values()}) > 1
    with pytest.raises(errors.ModelError, match="was trained on another base"):
        generate.main([f"--model={whole}", f"--adapter={on_base}", *few])


def test_errors_of_the_model_are_not_those_of_the_output(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise OSError("the model's disk is gone")

    monkeypatch.setattr(weights_load, "load", broken)
    with pytest.raises(OSError, match="the model's disk is gone"):
        generate.main(["--model=tiny", "--prompt=x", f"--output={tmp_path / 'out.txt'}"])


def test_a_taken_output_is_found_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_load, "load", lambda *a, **k: pytest.fail("is loaded"))
    out = tmp_path / "out.txt"
    out.write_text("mine")
    with pytest.raises(errors.ModelError, match="out.txt: exists, and nothing is overwritten"):
        generate.main(["--model=tiny", "--prompt=x", f"--output={out}"])


# ---- chat --------------------------------------------------------------------------------------


def talk(capsys, monkeypatch, text: str, *arguments: str) -> tuple[list[str], list[str]]:
    """Lines of standard output and of standard error for a piped conversation."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert chat.main(["--model=tiny", "--max-new-tokens=6", *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err.splitlines()


def history_answer(*turns: tuple[str, str], system: str | None = None, adapter=None) -> str:
    """The library's answer to a whole history."""
    paths = {"a": adapter} if adapter else {}
    options = loaded_model.ModelOptions("tiny", max_new_tokens=6)
    loaded = loaded_model.load_model(options, paths)
    messages = [{"role": role, "content": text} for role, text in turns]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    ids = loaded.ids(messages, where="x", max_new_tokens=6)
    variant = loaded.variant("a" if adapter else "base")
    return generation.answer(loaded, variant, [ids], options)[0].text


def test_the_history_is_kept_until_it_is_reset(capsys, monkeypatch):
    first = history_answer(("user", "Hello"))
    second = history_answer(("user", "Hello"), ("assistant", first), ("user", "Why?"))
    assert second != history_answer(("user", "Why?"))
    out, _ = talk(capsys, monkeypatch, "Hello\n\nWhy?\n/reset\nWhy?\n/quit\nno more\n")
    assert out == f"{first}\n{second}\n{history_answer(('user', 'Why?'))}\n"


def test_system_prompt_and_the_end_of_the_input(capsys, monkeypatch):
    out, _ = talk(
        capsys, monkeypatch, "Hello\n/system Be loud.\nHello\n/system\nHello", "--system=Be brief."
    )
    hello = ("user", "Hello")
    wants = [history_answer(hello, system=s) for s in ("Be brief.", "Be loud.", None)]
    assert out == "".join(f"{want}\n" for want in wants)
    assert len(set(wants)) == 3


def test_another_adapter_goes_on_with_the_history(capsys, monkeypatch, tmp_path):
    folder = write_adapter(tmp_path / "a", 1)
    loads = []
    real = weights_load.load
    monkeypatch.setattr(weights_load, "load", lambda *a, **k: loads.append(1) or real(*a, **k))
    text = "Hello\n/adapter base\nWhy?\n/adapter nonsuch\nWhat?\n"
    out, err = talk(capsys, monkeypatch, text, f"--adapter=a={folder}")
    assert len(loads) == 1
    history = [("user", "Hello")]
    answers = [history_answer(*history, adapter=folder)]
    for line in ("Why?", "What?"):
        history += [("assistant", answers[-1]), ("user", line)]
        answers.append(history_answer(*history))
    assert out == "".join(f"{text}\n" for text in answers)
    assert err[1].startswith("a answers; there are base, a.")
    assert "/adapter = 'nonsuch': is no adapter; known: a, base" in err


def test_errors_end_a_turn_and_not_the_conversation(capsys, monkeypatch):
    text = f"/rest\n{'x' * 2100}\nHello\n"
    out, err = talk(capsys, monkeypatch, text)
    assert out == history_answer(("user", "Hello")) + "\n"
    assert err[1] == "/rest: is not a command; did you mean '/reset'?"
    assert err[2].startswith("the conversation: has 2119 tokens; with 6 more that is beyond the")


def test_chat_refuses_what_it_cannot_begin_with(monkeypatch):
    with pytest.raises(errors.ConfigError, match=r"^--use = 'x': is no adapter; known: base"):
        chat.main(["--model=tiny", "--use=x"])
    with pytest.raises(errors.ConfigError, match=r"^--prompt: is not an argument"):
        chat.main(["--model=tiny", "--prompt=x"])
    with pytest.raises(errors.ConfigError, match=r"^--top-k = 5: has no effect"):
        chat.main(["--model=tiny", "--top-k=5"])
    with_tokenizer(monkeypatch, chat_template=None)
    with pytest.raises(errors.ModelError, match="has no chat template"):
        chat.main(["--model=tiny"])


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_show_their_usage_and_errors_without_traceback(command, tmp_path):
    call = [sys.executable, "-m", f"purelora.{command}"]
    shown = subprocess.run([*call, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert (shown.returncode, "--adapter" in shown.stdout) == (0, True)
    wrong = subprocess.run([*call, "--modle=x"], capture_output=True, text=True, cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.startswith("ConfigError: --modle: is not an argument of this command; did")
    assert "Traceback" not in wrong.stderr


def test_every_argument_is_documented():
    for module, kind in ((generate, generate.Options), (chat, chat.Options)):
        for field in dataclasses.fields(kind):
            assert "--" + field.name.replace("_", "-") in module.__doc__, field.name
