"""Adapters in and out: the same bits both ways, and the same logits as PEFT's own."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.core import errors, trees
from purelora.interop.peft import adapter_config, adapter_sources, artefact, attach, record, unroll
from purelora.interop.peft import files as peft_files
from purelora.models import causal_lm
from tests.support import tiny
from tests.support.trained_adapters import CASES, FEATURES, UNTIED, trained

FINGERPRINT = "f" * 64


def plain_model(tied: bool) -> causal_lm.CausalLM:
    return tiny.model(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)


def made(name: str, tied: bool):
    """A model with a feature, its base, and its trained leaves as an adapter."""
    plain = plain_model(tied)
    settings = tiny.lora_config(**(FEATURES | UNTIED)[name])
    m = plain.adapted(settings)
    base = tiny.weights(plain)
    leaves = trained(m, base)
    known = record.from_json(json.loads(json.dumps(record.of_model(m, settings, "tiny").to_json())))
    adapter = unroll.unrolled(leaves, known, path="run", base_fingerprint=FINGERPRINT)
    return m, base, leaves, adapter


def logits(m: causal_lm.CausalLM, trainable: trees.Tree, base: trees.Tree) -> np.ndarray:
    ids = tiny.inputs(tiny.tokens(3, 9))
    kept = {p: leaf for p, leaf in trees.flatten(base).items() if p not in m.adaptation.full}
    run = jax.jit(lambda t, b: m.logits(t, b, ids))
    return np.asarray(run(trainable, trees.unflatten(kept)))


def test_record_of_an_older_run_is_read_and_written_alike():
    """The JSON of versions that had no adapter kinds but LoRA, with DoRA as a flag."""
    q_proj = {
        "layers": [1],
        "names": ["model.layers.1.self_attn.q_proj"],
        "ranks": [4],
        "scalings": [2.0],
        "is_embedding": False,
        "use_dora": True,
    }
    peft = {
        "r": 4,
        "lora_alpha": 8.0,
        "target_modules": ["model.layers.1.self_attn.q_proj"],
        "target_parameters": [],
        "exclude_modules": [],
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": [],
        "use_rslora": False,
        "use_dora": True,
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": "default",
        "modules_to_save": ["model.norm"],
        "trainable_token_indices": {"embed_tokens": [5, 2]},
        "ensure_weight_tying": False,
        "base_model_name_or_path": "tiny",
    }
    stored = {
        "targets": {"layers.self_attn.q_proj": q_proj},
        "full": {"norm.weight": {"modules": ["model.norm"], "stacked": False, "transposed": False}},
        "tokens": {"model.embed_tokens": [5, 2]},
        "peft": peft,
        "interleaved": False,
    }
    settings = tiny.lora_config(
        target_modules=r".*\.1\..*q_proj",
        use_dora=True,
        modules_to_save=("norm",),
        trainable_token_indices=(5, 2),
    )
    m = plain_model(tied=True).adapted(settings)
    known = record.of_model(m, settings, "tiny")
    assert json.dumps(known.to_json()) == json.dumps(stored)
    assert record.from_json(stored) == known
    assert record.from_json(stored).adaptation == m.adaptation


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_round_trip_through_a_peft_folder_is_bit_equal(tmp_path: pathlib.Path, name, tied):
    m, _, leaves, adapter = made(name, tied)
    peft_files.write(str(tmp_path / "adapter"), adapter)
    read = adapter_sources.open_adapter(str(tmp_path / "adapter"))
    back = attach.attach(read, plain_model(tied), base_fingerprint=FINGERPRINT)
    assert back.model.adaptation == m.adaptation
    found = trees.flatten(back.trainable)
    assert found.keys() == leaves.keys()
    for path, array in leaves.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
        assert found[path].dtype == np.float32


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "tied"), CASES)
def test_peft_loads_ours_and_gives_the_same_logits(tmp_path: pathlib.Path, name, tied):
    m, base, leaves, adapter = made(name, tied)
    peft_files.write(str(tmp_path / "adapter"), adapter)
    model = peft_model(base, tied)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    want = logits(m, trees.unflatten(leaves), base)
    assert np.abs(want - logits(plain_model(tied), {}, base)).max() > 1e-2
    np.testing.assert_allclose(torch_logits(loaded), want, rtol=0, atol=1e-4)


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "tied"), CASES)
def test_adapters_of_peft_give_the_same_logits_here(tmp_path: pathlib.Path, name, tied):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    base = tiny.weights(plain_model(tied))
    options = (FEATURES | UNTIED)[name]
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    if tied and "modules_to_save" in options:
        options["ensure_weight_tying"] = True
    config = config_of_peft(options)
    made_by_peft = peft.get_peft_model(peft_model(base, tied), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made_by_peft.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.2 * noise.to(parameter))
    made_by_peft.save_pretrained(str(tmp_path / "adapter"))
    adapter = adapter_sources.open_adapter(str(tmp_path / "adapter"))
    found = attach.attach(adapter, plain_model(tied), base_fingerprint=FINGERPRINT)
    got = logits(found.model, found.trainable, base)
    np.testing.assert_allclose(got, torch_logits(made_by_peft), rtol=0, atol=1e-4)


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "tied"), CASES)
def test_gradients_are_those_of_peft(tmp_path: pathlib.Path, name, tied):
    """Of every trained tensor, after a loss over all logits."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    m, base, leaves, adapter = made(name, tied)
    peft_files.write(str(tmp_path / "adapter"), adapter)
    loaded = peft.PeftModel.from_pretrained(
        peft_model(base, tied), str(tmp_path / "adapter"), is_trainable=True
    )
    ids = tiny.tokens(3, 9)
    target = np.random.default_rng(4).standard_normal((3, 9, tiny.VOCAB)).astype(np.float32)
    (loaded(torch.tensor(ids).long()).logits * torch.tensor(target)).sum().backward()
    theirs = {}
    for key, parameter in loaded.named_parameters():
        if parameter.requires_grad:
            theirs[key.removeprefix("base_model.model.")] = parameter.grad.numpy()

    kept = {p: leaf for p, leaf in trees.flatten(base).items() if p not in m.adaptation.full}

    def total(trainable):
        logits = m.logits(trainable, trees.unflatten(kept), tiny.inputs(ids))
        return jnp.sum(logits * target)

    grads = trees.flatten(jax.jit(jax.grad(total))(trees.unflatten(leaves)))
    known = record.of_model(m, tiny.lora_config(**(FEATURES | UNTIED)[name]), "tiny")
    host = {path: np.array(grad) for path, grad in grads.items()}
    ours = unroll.unrolled(host, known, path="", base_fingerprint=None).modules
    scale = max(np.abs(grad).max() for grad in theirs.values())
    for key, grad in theirs.items():
        module, kind = _place(key)
        np.testing.assert_allclose(ours[module][kind], grad, atol=2e-5 * scale, err_msg=key)
    assert len(theirs) == sum(map(len, ours.values()))


def config_of_peft(options: dict[str, Any]):
    """PEFT's config of a feature, for the kind that it names."""
    peft = pytest.importorskip("peft")
    options = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"} | options
    kind = options.pop("peft_type", "lora")
    if kind == "ia3":
        # Other modules than a run would take, which the config says and no tensor's name.
        return peft.IA3Config(
            **options,
            feedforward_modules=[options["target_modules"][0]]
            if isinstance(options["target_modules"], list)
            else r".*\.layers\.\d\.mlp\.down_proj",
        )
    if kind == "loha":
        return peft.LoHaConfig(**{"r": 4, "alpha": 8} | options)
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8} | options)


def _place(key: str) -> tuple[str, str]:
    """Module and kind of a parameter of PEFT's model."""
    for part in (".base_layer", ".modules_to_save.default", ".token_adapter"):
        key = key.replace(part, "")
    parts = key.removesuffix(".default").removesuffix(".weight").split(".")
    kinds = {"trainable_tokens_delta": "trainable_tokens"}
    if parts[-1] == "default":
        parts.pop()
    if parts[-1].startswith(("lora_", "trainable_tokens", "ia3_", "hada_")):
        return ".".join(parts[:-1]), kinds.get(parts[-1], parts[-1])
    kind = "bias" if key.endswith(".bias") else "weight"
    return ".".join(parts[:-1] if kind == "bias" else parts), kind


def peft_model(base: trees.Tree, tied: bool):
    """The transformers model with the weights of `base`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    options = tiny.hf_config(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    plain = plain_model(tied)
    state = {}
    for path, leaf in trees.flatten(base).items():
        names = plain.hf_names[path]
        layers = np.asarray(leaf) if len(names) > 1 else np.asarray(leaf)[None]
        for name, layer in zip(names, layers, strict=True):
            transposed = plain.flat_infos[path].contracting == -2
            state[name] = torch.tensor(layer.T.copy() if transposed else layer.copy())
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def torch_logits(model) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model.eval()(torch.tensor(tiny.tokens(3, 9)).long()).logits.numpy()


def folder_of(tmp_path: pathlib.Path, config: dict[str, Any], modules: dict[str, Any]) -> str:
    settings = adapter_config.AdapterConfig(r=4, lora_alpha=8.0, **config)
    peft_files.write(str(tmp_path / "a"), artefact.Adapter("a", settings, modules, None))
    return str(tmp_path / "a")


def pair(out: int, into: int) -> dict[str, np.ndarray]:
    return {"lora_A": np.ones((4, into), np.float32), "lora_B": np.ones((out, 4), np.float32)}


EMBEDDING_PAIR = {
    "lora_embedding_A": np.ones((4, tiny.VOCAB), np.float32),
    "lora_embedding_B": np.ones((32, 4), np.float32),
}


@pytest.mark.parametrize(
    ("config", "modules", "message"),
    [
        (
            {"target_modules": ("embed_tokens",), "ensure_weight_tying": True},
            {"model.embed_tokens": EMBEDDING_PAIR},
            "has an adapter that lm_head shares",
        ),
        (
            {"target_modules": ("embed_tokens",), "kind": "dora"},
            {"model.embed_tokens": EMBEDDING_PAIR
             | {"lora_magnitude_vector": np.ones(32, np.float32)}},
            "use_dora = True: does not go with adapters on the embedding",
        ),
        (
            {"target_modules": ("lm_head",), "kind": "dora",
             "trainable_token_indices": {"embed_tokens": (1,)}},
            {"lm_head": pair(tiny.VOCAB, 32)
             | {"lora_magnitude_vector": np.ones(tiny.VOCAB, np.float32)},
             "model.embed_tokens": {"trainable_tokens": np.ones((1, 32), np.float32)}},
            "changes the norms that DoRA's magnitudes",
        ),
        (
            {"target_modules": ("q_proj",)},
            {f"model.layers.{i}.self_attn.q_proj": pair(32, 32) for i in range(2)},
            "layers.2.self_attn.q_proj: is a target of the adapter, which has no tensors",
        ),
        (
            {"target_modules": ("q_proj",)},
            {f"model.layers.{i}.self_attn.q_proj": pair(32, 24) for i in range(3)},
            r"has shape \[4, 24\], but this model makes it \[4, 32\]",
        ),
        (
            {"target_modules": ("q_proj",), "trainable_token_indices": {"embed_tokens": (1, 99)}},
            {"model.embed_tokens": {"trainable_tokens": np.ones((2, 32), np.float32)},
             **{f"model.layers.{i}.self_attn.q_proj": pair(32, 32) for i in range(3)}},
            "has the row of token 99, the base has 64 rows",
        ),
        (
            {"target_modules": ("q_proj",), "alpha_pattern": {"q_proj": 1e300}},
            {f"model.layers.{i}.self_attn.q_proj": pair(32, 32) for i in range(3)},
            "which float32 cannot hold",
        ),
        (
            {"target_modules": ("q_proj",), "modules_to_save": ("lm_head",)},
            {"lm_head": {"weight": np.ones((tiny.VOCAB, 32), np.float32)},
             **{f"model.layers.{i}.self_attn.q_proj": pair(32, 32) for i in range(3)}},
            "lm_head: is trained apart from its twin",
        ),
    ],
)  # fmt: skip
def test_what_this_model_cannot_compute_is_refused(tmp_path, config, modules, message):
    adapter = adapter_sources.open_adapter(folder_of(tmp_path, config, modules))
    with pytest.raises(errors.ModelError, match=message):
        attach.attach(adapter, tiny.model(), base_fingerprint=None)


@pytest.mark.parametrize("name", ["plain", "norms", "rank_pattern", "dora in some layers"])
def test_a_model_of_one_layer_is_a_stack_of_one(tmp_path, name):
    plain = tiny.model(num_hidden_layers=1)
    changes = {
        "norms": {"modules_to_save": ("k_proj", "input_layernorm")},
        "rank_pattern": {"rank_pattern": {"k_proj": 2}},
        "dora in some layers": {"use_dora": True},
    }.get(name, {})
    settings = tiny.lora_config(**{"target_modules": ("q_proj", "v_proj", "k_proj")} | changes)
    m = plain.adapted(settings)
    leaves = trained(m, tiny.weights(plain))
    known = record.of_model(m, settings, "tiny")
    adapter = unroll.unrolled(leaves, known, path="run", base_fingerprint=None)
    assert all(array.ndim <= 2 for kinds in adapter.modules.values() for array in kinds.values())
    peft_files.write(str(tmp_path / "a"), adapter)
    read = adapter_sources.open_adapter(str(tmp_path / "a"))
    back = attach.attach(read, plain, base_fingerprint=None)
    for path, array in leaves.items():
        np.testing.assert_array_equal(trees.flatten(back.trainable)[path], array, err_msg=path)
