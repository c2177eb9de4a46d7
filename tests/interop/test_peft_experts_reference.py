"""Adapters on experts and peft: made there and used here, made here and used there."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from purelora.core import trees
from purelora.interop.peft import adapter_sources, artefact, attach, record, unroll
from purelora.interop.peft import files as peft_files
from tests.support import reference_models, tiny
from tests.support.expert_adapters import lora_masked
from tests.support.reference_models import Made, their_logits

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

made = reference_models.made
MIXTURES = pytest.mark.parametrize(
    "made", [pytest.param("mixtral", marks=pytest.mark.slow), "qwen3_moe", "gpt_oss"], indirect=True
)


def some(cases: Any, *quick: str) -> list[Any]:
    """The names of cases, most of which are slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in cases]


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def theirs(made: Made) -> Any:
    return type(made.theirs).from_pretrained(str(made.folder), attn_implementation="eager")


def config_of(made: Made) -> Any:
    return json.loads((made.folder / "config.json").read_text())


def renamed(options: dict[str, Any], made: Made) -> dict[str, Any]:
    """The options with the name that the family's router has."""
    name = "router" if made.model.is_interleaved else "gate"
    names = {"gate": name, "mlp.gate.weight": f"mlp.{name}.weight"}
    return {
        key: type(value)(names.get(entry, entry) for entry in value)
        if isinstance(value, (list, tuple))
        else value
        for key, value in options.items()
    }


def our_logits(made: Made, folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    adapter = adapter_sources.open_adapter(str(folder), config_of(made))
    attached = attach.attach(adapter, made.model, base_fingerprint=None)
    return logits(attached.model, attached.trainable, made, tokens)


def logits(m: Any, trainable: trees.Tree, made: Made, tokens: np.ndarray) -> np.ndarray:
    """Logits on the base, whose leaves that are trained whole are left out."""
    flat = trees.flatten(made.base)
    frozen = trees.unflatten({p: flat[p] for p in flat if p not in m.adaptation.full})
    run = jax.jit(lambda t, b, i: m.logits(t, b, i))
    return np.asarray(run(trainable, frozen, tiny.inputs(tokens)))


def assert_same(got: np.ndarray, want: np.ndarray, made: Made, tokens: np.ndarray):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert np.abs(want - their_logits(made.theirs, tokens)).max() > 0.05


OF_PEFT = {
    "all": {"target_modules": "all-linear"},
    "experts": {"target_modules": [], "target_parameters": EXPERTS},
    "down": {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]},
    "gate and up, router": {
        "target_modules": [],
        "target_parameters": [EXPERTS[0], "mlp.gate.weight"],
        "use_rslora": True,
    },
    "some layers": {
        "target_modules": ["v_proj"],
        "target_parameters": ["layers.1.mlp.experts.gate_up_proj", *EXPERTS[1:]],
        "rank_pattern": {"layers.1.mlp.experts.gate_up_proj": 6, "v_proj": 2},
        "alpha_pattern": {r".*experts.down_proj": 12},
    },
}


@MIXTURES
@pytest.mark.parametrize("name", some(OF_PEFT, "all", "some layers"))
def test_made_by_peft(made, name, tmp_path):
    """Adapters of peft give its logits here; written here, they give the same again in peft."""
    options = renamed(OF_PEFT[name], made)
    settings = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(theirs(made), settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    adapted.save_pretrained(str(tmp_path / "theirs"))
    tokens = tiny.tokens(2, 12)
    want = their_logits(adapted, tokens)
    assert_same(our_logits(made, tmp_path / "theirs", tokens), want, made, tokens)
    read = adapter_sources.open_adapter(str(tmp_path / "theirs"), config_of(made))
    peft_files.write(str(tmp_path / "ours"), read)
    artefact.check_equal(peft_files.read(str(tmp_path / "ours")), read)
    again = peft.PeftModel.from_pretrained(theirs(made), str(tmp_path / "ours"))
    assert_same(their_logits(again, tokens), want, made, tokens)


OURS = {
    "all": {},
    "experts": {"target_modules": "experts", "use_rslora": True, "r": 3},
    "gate": {"target_modules": ("gate_proj", "q_proj")},
    "up and down, router": {"target_modules": ("up_proj", "down_proj", "gate")},
    "some layers": {
        "target_modules": ("gate_proj", "up_proj", "down_proj", "v_proj"),
        "layers_to_transform": (0, 2),
        "rank_pattern": {"layers.2.mlp.experts.(gate|up)_proj": 2, "v_proj": 2},
        "alpha_pattern": {"layers.2.mlp.experts.(gate|up)_proj": 5.0},
    },
    "router whole": {"target_modules": "experts", "modules_to_save": ("gate",)},
}


@MIXTURES
@pytest.mark.parametrize("name", some(OURS, "gate", "some layers"))
def test_made_here(made, name, tmp_path):
    """The logits that peft computes from the folder."""
    settings = tiny.lora_config(**renamed(OURS[name], made))
    m = made.model.adapted(settings)
    adapters = tiny.adapters(m)
    if m.adaptation.full:
        flat = trees.flatten(adapters)
        whole = trees.flatten(made.base)
        adapters = trees.unflatten(
            flat | {path: whole[path] + 0.2 * flat[path] for path in m.adaptation.full}
        )
    adapters = lora_masked(adapters, m)
    host = {path: np.asarray(leaf) for path, leaf in trees.flatten(adapters).items()}
    known = record.of_model(m, settings, "tiny")
    ours = unroll.unrolled(host, known, path="", base_fingerprint=None)
    peft_files.write(str(tmp_path / "a"), ours)
    artefact.check_equal(peft_files.read(str(tmp_path / "a")), ours)
    again = peft.PeftModel.from_pretrained(theirs(made), str(tmp_path / "a"))
    tokens = tiny.tokens(2, 12)
    got = logits(m, adapters, made, tokens)
    assert_same(got, their_logits(again, tokens), made, tokens)


@pytest.mark.parametrize("made", ["mixtral", "qwen3_moe"], indirect=True)
def test_of_the_older_layout(made, tmp_path):
    """An adapter on each expert by itself, which peft converts when it loads it."""
    is_mixtral = made.model.config.experts.files == "mixtral"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    names = dict(zip(("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), strict=True))
    draw, tensors, r = np.random.default_rng(0), {}, 3
    for matrix, older in names.items():
        _, _, n_in, n_out = made.model.flat_infos[f"layers.mlp.experts.{matrix}.weight"].shape
        for layer in range(made.model.config.num_hidden_layers):
            for expert in range(made.model.config.experts.count):
                own = older if is_mixtral else matrix
                name = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{own}"
                for kind, shape in (("lora_A", (r, n_in)), ("lora_B", (n_out, r))):
                    values = draw.normal(0, 0.2, shape).astype(np.float32)
                    tensors[f"{name}.{kind}.weight"] = values
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": 6,
        "target_modules": list(names.values() if is_mixtral else names),
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    again = peft.PeftModel.from_pretrained(theirs(made), str(tmp_path))
    tokens = tiny.tokens(2, 12)
    want = their_logits(again, tokens)
    assert_same(our_logits(made, tmp_path, tokens), want, made, tokens)
