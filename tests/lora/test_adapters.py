"""Adapters: targets by PEFT's rules, shapes and scale as qwix has them, compact storage, counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from purelora.core import errors, param_info, trees
from purelora.interop.peft import record
from purelora.lora import adapters as lora
from purelora.lora import resolve, targets
from purelora.lora.kinds import lora as lora_kind
from tests.support import tiny

ATTN, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def names(target_modules, exclude=(), **changes) -> set[str]:
    """Hugging Face names of the modules that get adapters."""
    m = tiny.with_lora(tiny.model(**changes), target_modules, exclude)
    return {name for target in m.adaptation.targets.values() for name in target.names}


def modules(*leaves: str, layers=range(tiny.LAYERS)) -> set[str]:
    return {
        f"model.layers.{i}.{'self_attn' if leaf in ATTN else 'mlp'}.{leaf}"
        for i in layers
        for leaf in leaves
    }


def test_a_word_is_a_list_to_peft():
    settings = tiny.lora_config(target_modules="attention", layers_to_transform=(0, 2))
    m = tiny.model().adapted(settings)
    found = record.adapter_config(m, settings, "tiny")
    assert found.layers_to_transform is None
    assert set(found.target_modules) == modules(*ATTN, layers=[0, 2])


@pytest.mark.parametrize("tied", [True, False])
def test_all_linear_is_all_but_the_head(tied):
    assert names("all-linear", tie_word_embeddings=tied) == modules(*ATTN, *MLP)


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        (["q_proj"], (), modules("q_proj")),
        (("q_proj", "lm_head"), (), modules("q_proj") | {"lm_head"}),
        (["mlp.up_proj", "self_attn.k_proj"], (), modules("up_proj", "k_proj")),
        (["model.layers.1.mlp.up_proj"], (), modules("up_proj", layers=[1])),
        (["layers.2.mlp.up_proj", "q_proj"], (),
         modules("q_proj") | modules("up_proj", layers=[2])),
        (r".*\.(q|v)_proj", (), modules("q_proj", "v_proj")),
        (r"model\.layers\.[02]\.mlp\..*", (), modules(*MLP, layers=[0, 2])),
        ("lm_head", (), {"lm_head"}),
        ("attention", (), modules(*ATTN)),
        ("mlp", ["up_proj"], modules("gate_proj", "down_proj")),
        ("all-linear", ["mlp.down_proj"], modules(*ATTN, "gate_proj", "up_proj")),
        ("all-linear", r".*layers\.0\..*", modules(*ATTN, *MLP, layers=[1, 2])),
        (["q_proj", "k_proj"], ["layers.1.self_attn.q_proj"],
         modules("k_proj") | modules("q_proj", layers=[0, 2])),
    ],
)  # fmt: skip
def test_targets(targets, exclude, expected):
    assert names(targets, exclude) == expected


@pytest.mark.parametrize(
    ("targets", "exclude", "message"),
    [
        (["query"], (), r"modules = 'query': matches no linear.*it has q_proj, .*all-linear"),
        (["q_proj", "proj"], (), r"target_modules = 'proj': matches no linear module"),
        (["q_pro"], (), r"target_modules = 'q_pro': matches no linear"),
        ("q_proj", (), r"target_modules = 'q_proj': matches no linear module"),
        (r".*layers\.7\..*", (), r"for example model.layers.0.self_attn.q_proj"),
        (["input_layernorm"], (), r"'input_layernorm': matches no linear module"),
        ("(", (), r"target_modules = '\(': is not a regular expression"),
        (["q_proj"], ["k_pro"], r"exclude_modules = 'k_pro': matches no linear module"),
        (["q_proj"], r".*[qk]_proj", r"matches no linear module that is not excluded"),
        (["q_proj"], "all-linear", r"exclude_modules = 'all-linear': would leave out everything"),
    ],
)
def test_targets_that_match_nothing(targets, exclude, message):
    with pytest.raises(errors.ConfigError, match=message):
        names(targets, exclude)


def test_all_unmatched_entries_are_reported():
    with pytest.raises(errors.ConfigError) as caught:
        names(["query", "q_proj", "value"], ["norm"])
    assert [(p.where, p.value) for p in caught.value.problems] == [
        ("lora.target_modules", "query"),
        ("lora.target_modules", "value"),
        ("lora.exclude_modules", "norm"),
    ]


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
def test_targets_are_those_of_peft():
    """Names, ranks and the trainable count over many patterns, on a real transformers model."""
    pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    patterns = [
        ("all-linear", None), (["q_proj"], None), (["q_proj", "lm_head"], None),
        (["mlp.up_proj"], None), (["layers.1.mlp.up_proj", "v_proj"], None),
        (r".*\.(q|v)_proj", None), (r"model\.layers\.[02]\.mlp\..*_proj", None),
        (r".*proj", r".*\.0\..*"), (["q_proj", "k_proj"], ["layers.1.self_attn.q_proj"]),
        ("all-linear", ["down_proj"]), ("lm_head|.*layers.1.*proj", None),
    ]  # fmt: skip
    for chosen, exclude in patterns:
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=chosen,
            exclude_modules=exclude,
            task_type="CAUSAL_LM",
        )
        hf = transformers.LlamaConfig(**tiny.hf_config(tie_word_embeddings=False))
        model = peft.get_peft_model(transformers.LlamaForCausalLM(hf), config)
        adapted = {
            name.removeprefix("base_model.model."): layer.scaling["default"]
            for name, layer in model.named_modules()
            if isinstance(layer, peft.tuners.lora.LoraLayer)
        }
        m = tiny.with_lora(tiny.model(tie_word_embeddings=False), chosen, exclude or ())
        ours = {
            name: scaling
            for t in m.adaptation.targets.values()
            for name, scaling in zip(t.names, t.scalings, strict=True)
        }
        assert ours == adapted, (chosen, exclude)
        trainable, _ = model.get_nb_trainable_parameters()
        assert elements(m.adapter_infos()) == trainable


def elements(infos: trees.Tree) -> int:
    return sum(int(np.prod(i.shape)) for i in trees.flatten(infos).values())


@pytest.mark.parametrize("r", [1, 4, 32])
def test_trainable_count(r):
    """r · (in + out) for each adapted matrix."""
    m = tiny.with_lora(tiny.model(), "all-linear", r=r)
    sides = 32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32
    assert elements(m.adapter_infos()) == tiny.LAYERS * r * sum(sides)


def test_shapes_axes_and_initial_values():
    """lora_a is drawn anew for every layer, lora_b is zero; each takes its kernel's axes."""
    m = tiny.with_lora(tiny.model(), r".*(down_proj|lm_head)")
    infos, values = trees.flatten(m.adapter_infos()), trees.flatten(tiny.adapters(m, fresh=True))
    expected = {
        "layers.mlp.down_proj.lora_a": ((3, 48, 4), ("layers", "mlp", "rank")),
        "layers.mlp.down_proj.lora_b": ((3, 4, 32), ("layers", "rank", "embed")),
        "lm_head.lora_a": ((32, 4), ("embed", "rank")),
        "lm_head.lora_b": ((4, tiny.VOCAB), ("rank", "vocab")),
    }
    assert {p: (i.shape, i.axes) for p, i in infos.items()} == expected
    for path, value in values.items():
        assert value.dtype == jnp.float32
        assert bool(value.any()) == path.endswith("lora_a")
    a = values["layers.mlp.down_proj.lora_a"]
    assert len({np.asarray(layer).tobytes() for layer in a}) == 3
    limit = np.sqrt(6 / 48)
    assert 0.95 * limit < np.abs(a).max() <= limit


@pytest.mark.parametrize(("r", "alpha"), [(4, 8.0), (2, 3.0), (8, 8.0)])
def test_agrees_with_qwix(r, alpha):
    """Shapes, scale and the initial law are those that qwix injects into an nnx model."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.q_proj = nnx.Linear(32, 24, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.q_proj(x)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 32)), jnp.float32)
    provider = qwix.LoraProvider(module_path=".*q_proj", rank=r, alpha=alpha)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = qwix.apply_lora_to_model(Net(nnx.Rngs(0)), provider, x, rngs=nnx.Rngs(1))
        b = 0.1 * jax.random.normal(jax.random.key(4), (r, 24))
        theirs.q_proj.kernel_lora_b.set_value(b)
        want = theirs(x)
    kernel = theirs.q_proj.kernel.get_value()
    a = theirs.q_proj.kernel_lora_a.get_value()

    weight = param_info.ParamInfo((32, 24), "float32", ("embed", "heads"), contracting=-2)
    found = {"q_proj": targets.AdaptableModule(weight, ("q_proj",))}
    settings = tiny.lora_config(r=r, lora_alpha=alpha, target_modules=("q_proj",))
    resolved = resolve.resolve(settings, found, {"q_proj.weight": ("q_proj.weight",)}).targets
    infos = lora.adapter_infos(found, resolved)["q_proj"]
    assert (infos["lora_a"].shape, infos["lora_b"].shape) == (a.shape, b.shape)
    (scaling,) = resolved["q_proj"].scalings
    assert scaling == alpha / r
    got = x @ kernel + lora_kind.delta(x, a, b, jnp.float32(scaling))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    ours = param_info.initial(infos["lora_a"], key=jax.random.key(0))
    limit = np.sqrt(6 / 32)  # Both are uniform on the same interval.
    assert np.abs(a).max() <= limit and np.abs(ours).max() <= limit
    np.testing.assert_allclose(ours.std(), limit / np.sqrt(3), rtol=0.2)
    np.testing.assert_allclose(a.std(), limit / np.sqrt(3), rtol=0.2)


def test_compact_adapters_are_a_full_stack_with_zeros_elsewhere():
    """In logits and in the gradient of the layers that are stored."""
    base, inputs = tiny.weights(tiny.model()), tiny.inputs(tiny.tokens(2, 6))
    compact = tiny.with_lora(tiny.model(), r".*layers\.[02]\..*(q_proj|up_proj)")
    full = tiny.with_lora(tiny.model(), ["q_proj", "up_proj"])
    adapters = tiny.adapters(compact)
    assert {a.shape[0] for a in jax.tree.leaves(adapters)} == {2}
    assert elements(compact.adapter_infos()) * 3 == elements(full.adapter_infos()) * 2
    spread = jax.tree.map(lambda a: jnp.stack([a[0], jnp.zeros_like(a[0]), a[1]]), adapters)

    def run(m, trainable):
        def loss(t):
            logits = m.logits(t, base, inputs)
            return jnp.mean(jnp.sin(logits)), logits

        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
        return logits, grads

    (got, grads), (want, wide) = run(compact, adapters), run(full, spread)
    np.testing.assert_array_equal(got, want)
    picked = jax.tree.map(lambda g: g[np.array([0, 2])], wide)
    chex.assert_trees_all_close(grads, picked, rtol=0, atol=1e-6)
    assert all(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(grads))
    assert np.abs(got - tiny.model().logits({}, base, inputs)).max() > 1e-2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_delta_has_the_gradient_of_its_formula(dtype):
    """The gradients that are written out are autodiff's own; adapters get theirs in float32."""
    rng = np.random.default_rng(0)
    x, a, b, g = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((2, 5, 16), (16, 4), (4, 8), (2, 5, 8))
    )
    out, pull = jax.vjp(lambda *p: lora_kind.delta(*p, jnp.float32(0.5)), x.astype(dtype), a, b)
    want, plain_pull = jax.vjp(lambda x, a, b: 0.5 * (x @ a @ b), x, a, b)
    grads, plain_grads = pull(g.astype(dtype)), plain_pull(g)
    assert [v.dtype for v in (out, *grads)] == [dtype, dtype, jnp.float32, jnp.float32]
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03
    for got, exact in zip((out, *grads), (want, *plain_grads), strict=True):
        error = np.abs(got.astype(jnp.float32) - exact).max()
        assert error <= tolerance * np.abs(exact).max()


def test_delta_computes_in_the_dtype_of_x():
    x, a, b = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 2)), jnp.ones((2, 3))
    y = lora_kind.delta(x, a, b, jnp.float32(0.5))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jnp.full((2, 3), 8, jnp.bfloat16))
