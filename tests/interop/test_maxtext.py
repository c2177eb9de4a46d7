"""MaxText's checkpoints: read to the weights by which purelora computes what MaxText computes.

The checkpoints in data/maxtext were made by MaxText, with the logits of its own forward pass.
"""

import collections
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers

from purelora.commands import export, generate, merge
from purelora.core import errors, layer_axis, trees
from purelora.formats import array_store, source
from purelora.interop import builtin, open_model
from purelora.interop.maxtext import folder as maxtext_folder
from purelora.interop.maxtext import read as maxtext_read
from purelora.interop.peft import adapter_sources, attach
from purelora.models import causal_lm
from tests.support import runs, tiny

DATA = pathlib.Path(__file__).parents[1] / "fixtures" / "maxtext"
BASES = (
    "llama-axis1",
    "llama-axis0",
    "llama-unscanned",
    "llama-square",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gemma2",
    "gemma2-unscanned",
    "gemma3",
)
REPO = pathlib.Path(__file__).parents[2]


def items(name: str) -> str:
    found = maxtext_folder.find(str(DATA / name))
    assert found is not None
    return found


@functools.cache
def opened(name: str) -> maxtext_read.MaxTextSource:
    return maxtext_read.open_folder(items(name), str(DATA / name))


@functools.cache
def weights(name: str) -> dict:
    return leaves_of(opened(name), opened(name).model)


def leaves_of(read: source.Source, model: causal_lm.CausalLM) -> dict:
    """The leaves of a model: float32, kernels [in, out], layers stacked."""
    leaves = {}
    for path, parts in model.layout_of(read.shapes()).parts.items():
        leaf = np.empty(model.flat_infos[path].shape, np.float32)
        for part in parts:
            values = read.read_part(part.tensor, part.box)
            leaf[part.index] = values.T if part.is_transposed else values
        leaves[path] = jnp.asarray(leaf)
    return leaves


def logits(model: causal_lm.CausalLM, trainable, leaves, tokens) -> np.ndarray:
    base = trees.unflatten(leaves)
    return np.asarray(model.logits(trainable, base, tiny.inputs(tokens)))


def reference(name: str, kind: str = "logits") -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and MaxText's logits of them without the rows that fill up its table."""
    stored = np.load(DATA / name / "reference.npz")
    return stored["tokens"], stored[kind][..., : opened_config(name)["vocab_size"]]


def opened_config(name: str) -> dict:
    return json.loads((DATA / name / "config.json").read_text())


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_the_base_computes_what_maxtext_computes(name):
    tokens, wanted = reference(name)
    got = logits(opened(name).model, {}, weights(name), tokens)
    assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert np.abs(wanted).max() > 1


@pytest.mark.parametrize("name", ["llama-axis1", "llama-axis0", "gemma2", "qwen2", "mixtral"])
def test_any_part_of_a_tensor_is_that_part_of_the_whole(name):
    read, rng = opened(name), np.random.default_rng(0)
    for tensor, shape in read.shapes().items():
        whole = read.read(tensor).array
        assert whole.shape == shape
        for _ in range(3):
            ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in shape]
            box = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(read.read_part(tensor, box), whole[box])


def test_layers_may_be_asked_for_in_any_order_and_few_stacks_are_kept():
    read = maxtext_read.open_folder(items("gemma3"), str(DATA / "gemma3"))
    names = list(read.shapes())
    for name in np.random.default_rng(0).permutation(names):
        np.testing.assert_array_equal(read.read(name).array, opened("gemma3").read(name).array)
        assert len(read.layers._kept) <= 6


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "mixtral", "qwen3-moe"])
def test_a_stack_is_read_once_and_not_kept_beyond_its_last_layer(name, monkeypatch):
    read, counts = maxtext_read.open_folder(items(name), str(DATA / name)), collections.Counter()
    plain = array_store.Store.read

    def counting(self, array, box):
        counts[array] += 1
        return plain(self, array, box)

    monkeypatch.setattr(array_store.Store, "read", counting)
    for parts in read.model.layout.parts.values():  # As a base is loaded.
        for part in parts:
            read.read(part.tensor)
        assert not read.layers._kept
    assert set(counts.values()) == {1}


def saved(folder: pathlib.Path, arrays: dict, notes: dict | None = None) -> str:
    """The items of a step: `arrays`, by path in MaxText's model, saved as MaxText saves."""
    tree = trees.unflatten({f"params.params.{path}": array for path, array in arrays.items()})
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(folder / "items", tree)
    if notes is not None:
        (folder / array_store.NOTES).write_text(json.dumps({"custom_metadata": notes}))
    return str(folder / "items")


def stored(name: str) -> dict[str, np.ndarray]:
    """All arrays of a fixture by path in MaxText's model."""
    named = maxtext_folder.parameters(items(name))
    store = array_store.open_store(items(name), list(named.values()))
    whole = {own: tuple(slice(n) for n in store.shape(at)) for own, at in named.items()}
    return {own: store.read(at, whole[own]) for own, at in named.items()}


def scanned_along(axis: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays that are scanned along axis 1, along `axis`."""
    pair = layer_axis.Pair(dict.fromkeys(arrays), arrays)
    where = lambda path: "layers" in path  # noqa: E731
    return layer_axis.move_scan_axis(pair, 1, axis, where=where).arrays


def unscanned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    pair = layer_axis.Pair(None, None)
    found = {path: array for path, array in arrays.items() if ".layers." not in path}
    for path, array in arrays.items():
        pair = layer_axis.Pair(None, array)
        for i, layer in enumerate(layer_axis.unstack(pair, 1) if ".layers." in path else ()):
            found[path.replace(".layers.", f".layers_{i}.")] = layer.arrays
    return found


@pytest.mark.parametrize("change", [functools.partial(scanned_along, 0), unscanned])
def test_the_fingerprint_does_not_depend_on_how_layers_are_scanned(tmp_path, change):
    arrays = change(stored("llama-axis1"))
    read = maxtext_read.open_folder(saved(tmp_path, arrays), str(DATA / "llama-axis1"))
    names = list(read.shapes())
    assert source.identify(read, names) == source.identify(opened("llama-axis1"), names)


def test_layers_that_are_stored_apart_are_read_apart(tmp_path):
    arrays, devices = stored("llama-axis1"), jax.sharding.Mesh(jax.devices()[:3], ("x",))
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(None, "x"))
    arrays |= {n: jax.device_put(a, split) for n, a in arrays.items() if ".layers." in n}
    read = maxtext_read.open_folder(saved(tmp_path, arrays), str(DATA / "llama-axis1"))
    for name in read.shapes():
        np.testing.assert_array_equal(read.read(name).array, opened("llama-axis1").read(name).array)
        assert not read.layers._kept


# ---- adapters ----------------------------------------------------------------------------------


def adapted(name: str, base: str, **told) -> tuple[attach.Attached, dict]:
    model = opened(base).model
    adapter = adapter_sources.open_adapter(str(DATA / name), opened_config(name), **told)
    return attach.attach(adapter, model, base_fingerprint=None), weights(base)


@pytest.mark.parametrize(
    ("name", "base", "told"),
    [
        ("llama-adapters", "llama-axis0", {}),
        ("llama-adapters-sft", "llama-axis1", {"lora_alpha": 6.0}),
        ("gemma3", "gemma3", {}),
    ],
)
def test_adapters_compute_what_maxtext_computes(name, base, told):
    attached, leaves = adapted(name, base, **told)
    tokens, wanted = reference(name, "adapted_logits")
    trainable = jax.tree.map(jnp.asarray, attached.trainable)
    got = logits(attached.model, trainable, leaves, tokens)
    _, without = reference(name)
    assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert np.abs(without - wanted).max() > 0.1
    told_so = any("lora_alpha, which is taken to be 6" in note for note in attached.notes)
    assert told_so == bool(told)


# ---- what is refused ---------------------------------------------------------------------------


def test_missing_surplus_and_misshapen_arrays_are_one_error(tmp_path):
    arrays = stored("llama-axis1")
    del arrays["decoder.decoder_norm.scale"], arrays["decoder.layers.mlp.wo.kernel"]
    arrays["decoder.layers.mlp.wi_0.bias"] = np.zeros((24, 3), np.float32)
    arrays["decoder.layers.self_attention.key.kernel"] = np.zeros((16, 3, 4, 8), np.float32)
    arrays["decoder.logits_dense.kernel"] = np.zeros((16, 47), np.float32)
    arrays["token_embedder.embedding"] = np.zeros((48, 16), np.int32)
    with pytest.raises(errors.ModelError) as caught:
        maxtext_read.open_folder(saved(tmp_path, arrays), str(DATA / "llama-axis1"))
    told = [str(problem) for problem in caught.value.problems]
    assert [text.partition("items")[2] for text in told] == [
        ": holds no array 'decoder.layers.mlp.wo.kernel'",
        ": holds no array 'decoder.decoder_norm.scale'",
        ": holds an array 'decoder.layers.mlp.wi_0.bias' that this architecture does not have; "
        "is config.json of another model?",
        ": decoder.layers.self_attention.key.kernel: has shape [16, 3, 4, 8], but config.json "
        "makes it [3, 16, 2, 8] or [16, 3, 2, 8]",
        ": decoder.logits_dense.kernel: has shape [16, 47], but config.json makes it [16, 48]",
        ": token_embedder.embedding = 'int32': is an element type that is not read; convert the "
        "model to one of F32, F16, BF16",
    ]


def changed_config(tmp_path, name: str, **changes) -> str:
    (tmp_path / "config.json").write_text(json.dumps(opened_config(name) | changes))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-axis1", {"num_hidden_layers": 4}, r"wi_0.kernel: has shape \[16, 3, 24\], but"),
        ("llama-unscanned", {"num_hidden_layers": 4}, "holds no array 'decoder.layers_3.mlp.wi_0"),
        ("llama-unscanned", {"num_hidden_layers": 2}, "holds an array 'decoder.layers_2.mlp.wi_0"),
        ("gemma2", {"num_hidden_layers": 5}, "num_hidden_layers = 5: is not a multiple of 2"),
        ("gemma2", {"vocab_size": 65}, r"embedding: has shape \[64, 16\], but config.json makes"),
        ("gemma3", {"query_pre_attn_scalar": 9}, "scalar = 9.0.*: is not how MaxText scales"),
        ("llama-axis1", {"tie_word_embeddings": True}, None),
        ("llama-axis1", {"attention_bias": True}, "'model.layers.0.self_attn.q_proj.bias', which"),
        (
            "qwen3",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            "leaves open in which order MaxText keeps queries and keys",
        ),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, name, changes, message):
    folder = changed_config(tmp_path, name, **changes)
    if message is None:  # What is stored although it is tied is compared when it is loaded.
        assert "lm_head.weight" in maxtext_read.open_folder(items(name), folder).shapes()
        return
    with pytest.raises(errors.ModelError, match=message):
        maxtext_read.open_folder(items(name), folder)


def test_a_table_may_have_more_rows_but_not_those_of_another_model(tmp_path):
    assert opened("gemma2").shapes()["model.embed_tokens.weight"] == (48, 16)
    arrays = stored("gemma2") | {"token_embedder.embedding": np.zeros((2000, 16), np.float32)}
    with pytest.raises(errors.ModelError, match=r"embedding: has shape \[2000, 16\]"):
        maxtext_read.open_folder(saved(tmp_path, arrays), str(DATA / "gemma2"))


def test_a_scan_axis_that_cannot_be_told_is_refused(tmp_path):
    config = opened_config("llama-square") | {"intermediate_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = stored("llama-square")
    for name in arrays:
        if ".mlp." in name:
            arrays[name] = np.zeros((4, 4, 4), np.float32)
    with pytest.raises(errors.ModelError, match="fits scan axis 0 and 1") as caught:
        maxtext_read.open_folder(saved(tmp_path, arrays), str(tmp_path))
    assert len(caught.value.problems) == 1


def copied(tmp_path, name: str) -> pathlib.Path:
    """The items of a copy."""
    shutil.copytree(DATA / name, tmp_path / name)
    return tmp_path / name / "checkpoints" / "0" / "items"


def read_all(folder: pathlib.Path, name: str) -> None:
    read = maxtext_read.open_folder(str(folder), str(DATA / name))
    for tensor in read.shapes():
        read.read(tensor)


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in folder.rglob("d/*")), key=lambda p: p.stat().st_size)


def test_damage_is_an_error_and_never_zeros(tmp_path):
    folder = copied(tmp_path, "llama-axis0")
    read_all(folder, "llama-axis0")
    data = largest(folder)
    whole = data.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        data.write_bytes(damaged)
        with pytest.raises(errors.ModelError, match="cannot be read .*copy the folder again"):
            read_all(folder, "llama-axis0")
    data.unlink()
    with pytest.raises(errors.ModelError, match="cannot be read .*copy the folder again"):
        read_all(folder, "llama-axis0")
    (folder / "_METADATA").write_text("{}")
    with pytest.raises(errors.ModelError, match="_METADATA: has no tree_metadata"):
        read_all(folder, "llama-axis0")


def test_a_chunk_that_is_not_there_is_an_error(tmp_path):
    folder = copied(tmp_path, "llama-unscanned")
    read_all(folder, "llama-unscanned")
    (folder / "params.params.decoder.layers_1.mlp.wo.kernel" / "0.0").unlink()
    with pytest.raises(errors.ModelError, match=r"layers_1.mlp.wo.kernel: cannot be read"):
        read_all(folder, "llama-unscanned")


# ---- folders -----------------------------------------------------------------------------------


def test_a_checkpoint_is_found_from_any_of_its_folders(tmp_path):
    folder = copied(tmp_path, "llama-axis0")
    for path in (folder, *folder.parents[:3]):
        assert pathlib.Path(maxtext_folder.find(str(path))) == folder
    step = folder.parent
    shutil.copytree(step, step.parent / "9")
    shutil.copytree(step, step.parent / "10")
    shutil.copytree(step, step.parent / "11.orbax-checkpoint-tmp-5")
    assert pathlib.Path(maxtext_folder.find(str(step.parent))) == step.parent / "10" / "items"
    assert maxtext_folder.find(str(DATA)) is None
    assert maxtext_folder.find(str(tmp_path / "not there")) is None


def test_a_checkpoint_that_was_not_finished_is_refused(tmp_path):
    step = copied(tmp_path, "llama-axis0").parent
    part = step.rename(step.parent / "0.orbax-checkpoint-tmp-5")
    (part / "items").rename(part / "items.orbax-checkpoint-tmp-6")
    for path in (part, part.parent, tmp_path / "llama-axis0"):
        with pytest.raises(errors.ModelError, match="writing it was not finished"):
            maxtext_folder.find(str(path))


def test_a_model_of_the_sft_trainer_is_read_without_its_random_state(tmp_path):
    arrays = {f"{path}.value": array for path, array in stored("llama-axis1").items()}
    arrays["decoder.rngs.params.count.value"] = np.zeros((), np.uint32)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(tmp_path / "1" / "model_params", trees.unflatten(arrays))
    read = maxtext_read.open_folder(maxtext_folder.find(str(tmp_path)), str(DATA / "llama-axis1"))
    names = list(read.shapes())
    assert source.identify(read, names) == source.identify(opened("llama-axis1"), names)


# ---- commands ----------------------------------------------------------------------------------

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTU"
MAXTEXT_LORA = ("--config.lora.r=3", "--config.lora.lora_alpha=6")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> str:
    """config.json of the Llamas, and a tokenizer that makes a token of each letter."""
    folder = tmp_path_factory.mktemp("hf")
    shutil.copy(DATA / "llama-axis0" / "config.json", folder)
    vocab = {letter: i for i, letter in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return str(folder)


@pytest.fixture(scope="module")
def warm_run(tmp_path_factory, hf_folder) -> pathlib.Path:
    """A run that starts from MaxText's base and adapters, and learns next to nothing."""
    folder = tmp_path_factory.mktemp("run")
    rows = [json.dumps({"text": ALPHABET[i:] + ALPHABET[:i]}) for i in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    status = runs.run(
        folder / "run",
        f"--config.model.path={DATA / 'llama-axis0'}",
        f"--config.model.hf_folder={hf_folder}",
        f"--config.init_adapter={DATA / 'llama-adapters'}",
        f"--config.data.train={folder / 'rows.jsonl'}",
        "--config.task=pretrain",
        "--config.steps=1",
        "--config.data.eval_fraction=0.1",
        "--config.optim.learning_rate=1e-30",
        "--config.quant.qtype=none",
        "--config.sample_prompts=()",
        *MAXTEXT_LORA,
    )
    assert status == 0
    return folder / "run"


def test_a_run_from_maxtext_merges_to_what_maxtext_computes(tmp_path, warm_run, hf_folder):
    merged = tmp_path / "merged"
    arguments = [f"--adapter={warm_run}", f"--output={merged}", "--dtype=float32"]
    with pytest.raises(errors.ModelError, match="neither config.json nor tokenizer; set"):
        merge.main(arguments)
    assert merge.main([*arguments, f"--hf-folder={hf_folder}"]) == 0
    tokens, wanted = reference("llama-adapters", "adapted_logits")
    made = builtin.open_model(str(merged))
    model = causal_lm.from_hf(made.source.config, str(merged), dtype="float32")
    got = logits(model, {}, leaves_of(made.source, model), tokens)
    assert np.abs(got - wanted).max() < 3e-5 * np.abs(wanted).max()
    letters = made.tokenizer.encode("cab", add_special_tokens=False).ids
    assert list(letters) == [2, 0, 1]


def test_a_run_from_maxtext_is_exported(tmp_path, warm_run):
    assert export.main([f"--run={warm_run}", f"--output={tmp_path / 'adapter'}"]) == 0


def test_text_continues_as_maxtext_would(tmp_path, hf_folder):
    tokens, wanted = reference("llama-adapters", "adapted_logits")
    prompt = "".join(ALPHABET[i] for i in tokens[0])
    output = tmp_path / "answers.jsonl"
    base = [f"--model={DATA / 'llama-axis0'}", f"--hf-folder={hf_folder}"]
    rest = ["--raw", f"--prompt={prompt}", "--max-new-tokens=1", f"--output={output}"]
    assert generate.main([*base, f"--adapter={DATA / 'llama-adapters'}", *rest]) == 0
    answer = json.loads(output.read_text().splitlines()[0])
    assert ALPHABET[wanted[0, -1].argmax()] in answer.values()


def test_what_is_missing_or_too_much_is_said(tmp_path, hf_folder):
    path = str(DATA / "llama-axis0")
    with pytest.raises(errors.ModelError, match="is a MaxText checkpoint, which holds neither"):
        open_model.open_model(path)
    with pytest.raises(errors.ModelError, match="hf_folder = .*: is only for a MaxText checkpoint"):
        open_model.open_model("tiny", hf_folder=hf_folder)
    with pytest.raises(errors.ModelError, match="has no config.json; give the folder of"):
        open_model.open_model(path, hf_folder=str(tmp_path))
    assert open_model.open_config(path, hf_folder) == opened_config("llama-axis0")
    with pytest.raises(errors.ModelError, match="holds adapters without their base; give it as"):
        open_model.open_model(str(DATA / "llama-adapters"), hf_folder=hf_folder)


def test_what_adapters_lack_is_said(tmp_path):
    config = opened_config("llama-adapters")
    with pytest.raises(errors.ModelError, match="whose adapters are nothing without their base"):
        adapter_sources.open_adapter(str(DATA / "llama-adapters"))
    with pytest.raises(errors.ModelError, match="does not say its lora_alpha; start a run from it"):
        adapter_sources.open_adapter(str(DATA / "llama-adapters-sft"), config)
    with pytest.raises(errors.ModelError, match="items: holds no adapters"):
        adapter_sources.open_adapter(str(DATA / "llama-axis0"), config)
    arrays = stored("llama-adapters")
    del arrays["decoder.layers.mlp.wo.kernel_lora_b"]
    arrays["decoder.layers.mlp.gate.kernel_lora_a"] = np.zeros((3, 16, 3), np.float32)
    with pytest.raises(errors.ModelError) as caught:
        adapter_sources.open_adapter(saved(tmp_path / "half", arrays), config)
    assert [problem.what for problem in caught.value.problems] == [
        "holds no array 'decoder.layers.mlp.wo.kernel_lora_b'",
        "holds an array 'decoder.layers.mlp.gate.kernel_lora_a' that is of no linear module of "
        "this architecture",
    ]
    arrays = stored("llama-adapters")
    arrays["decoder.layers.mlp.wo.kernel_lora_b"] = np.zeros((3, 4, 16), np.float32)
    with pytest.raises(errors.ModelError, match=r"wo.kernel_lora_b: has shape \[3, 4, 16\], but"):
        adapter_sources.open_adapter(saved(tmp_path / "shape", arrays), config)
    for notes, message in (
        ({"lora_rank": 4, "lora_alpha": 6.0}, "lora_rank = 4: is not the rank 3 of the arrays"),
        ({"lora_rank": 3, "lora_alpha": 0.0}, "lora_alpha = 0.0: scales the adapters to nothing"),
    ):
        folder = tmp_path / str(notes["lora_rank"])
        path = saved(folder, stored("llama-adapters"), {"lora": notes})
        with pytest.raises(errors.ModelError, match=message):
            adapter_sources.open_adapter(path, config)
