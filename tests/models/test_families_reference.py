"""Every family against transformers and peft, from checkpoints that these have made."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.core import trees
from purelora.core.batch import Batch, Inputs
from purelora.formats import safetensors_file
from purelora.interop import open_model
from purelora.interop.peft import adapter_sources, attach, record, unroll
from purelora.interop.peft import files as peft_files
from purelora.models import decode, moe, objective
from purelora.sharding import parallel
from purelora.weights import hf_folder, hf_write
from tests.support import reference_models, tiny
from tests.support.reference_models import LENGTH, their_logits

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

made = reference_models.made


def test_the_file_as_first_written_is_the_same_model(made, request):
    """Of the older spellings in `families` and the newer ones that transformers writes."""
    name = request.node.callspec.params["made"]
    assert tiny.model(name).config == made.model.config


def test_logits(made):
    """Whole rows beyond the window, far positions, padding, and documents packed into a row."""
    tokens, place = tiny.tokens(2, LENGTH), np.tile(np.arange(LENGTH), (2, 1))
    run = jax.jit(lambda i: made.model.logits({}, made.base, i))
    near = tiny.inputs(tokens)
    want = their_logits(made.theirs, tokens)
    np.testing.assert_allclose(run(near), want, rtol=0, atol=1e-4)
    # Farther out, the last bits of the frequencies are worth more than 1e-4.
    for offset in (0, 1500):
        want = their_logits(made.theirs, tokens, position_ids=place + offset)
        far = near._replace(positions_BT=near.positions_BT + offset)
        np.testing.assert_allclose(run(far), want, rtol=0, atol=1e-4)
    # Row 0 is padded; row 1 holds two documents.
    cut = np.array([17, 9])
    segments = np.stack([place[0] < cut[0], 1 + (place[1] >= cut[1])]).astype(np.int32)
    packed = Inputs(
        near.tokens_BT,
        jnp.asarray(np.stack([place[0], np.where(segments[1] == 1, place[1], place[1] - cut[1])])),
        jnp.asarray(segments),
    )
    got = run(packed)
    mask = np.stack([segments[0], segments[0]])
    want = their_logits(made.theirs, tokens, attention_mask=mask)
    np.testing.assert_allclose(got[0, : cut[0]], want[0, : cut[0]], rtol=0, atol=1e-4)
    for part in (slice(0, cut[1]), slice(cut[1], LENGTH)):
        want = their_logits(made.theirs, tokens[1:, part])
        np.testing.assert_allclose(got[1, part], want[0], rtol=0, atol=1e-4)


def test_greedy_tokens(made):
    """With the cache, well beyond the window."""
    prompts = tiny.tokens(2, 6)
    ours = decode.complete(
        made.model, {}, made.base, prompts.tolist(), end_ids=[], max_new_tokens=12, dtype="float32"
    )
    made.theirs.generation_config.eos_token_id = None
    settings = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    mask = torch.ones(prompts.shape).long()
    theirs = made.theirs.generate(torch.tensor(prompts).long(), attention_mask=mask,
                                  generation_config=settings)  # fmt: skip
    np.testing.assert_array_equal(np.array(ours), theirs.numpy()[:, 6:])


def test_written_as_read(made, tmp_path):
    """Through the stacks and back bit for bit, and transformers loads what was written."""
    config = json.loads((made.folder / "config.json").read_text())
    leaves = {path: np.asarray(leaf) for path, leaf in trees.flatten(made.base).items()}
    stacks = open_model.RunSource("run", config, None, made.model, leaves)
    first = hf_folder.open_folder(str(made.folder))
    assert stacks.shapes() == first.shapes()
    tensors = {}
    for name in first.shapes():
        array = stacks.read(name).array
        assert array.tobytes() == first.read(name).array.tobytes(), name
        tensors[name] = safetensors_file.LazyTensor.of(array)
    hf_write.write_folder(str(tmp_path / "a"), config, tensors, companions={})
    again = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "a"), attn_implementation="eager"
    )
    tokens = tiny.tokens(1, LENGTH)
    # Not to the bit: they add up the outputs of experts in any order.
    want = their_logits(made.theirs, tokens)
    np.testing.assert_allclose(their_logits(again, tokens), want, rtol=0, atol=1e-6)


def with_drawn_adapters(made):
    """The model in peft, with random adapters on all linear modules."""
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules="all-linear"
    )
    again = type(made.theirs).from_pretrained(str(made.folder), attn_implementation="eager")
    theirs = peft.get_peft_model(again, settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return theirs


def compared(ours, theirs):
    """Compares gradients, ours by module and kind, with those of a model in peft; how many."""
    found = 0
    for key, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            name = key.removeprefix("base_model.model.").removesuffix(".default.weight")
            module, _, kind = name.rpartition(".")
            want = parameter.grad.numpy()
            np.testing.assert_allclose(ours[module][kind], want, rtol=0, atol=2e-5, err_msg=key)
            found += 1
    return found


def test_loss_and_gradients_of_peft(made, tmp_path):
    """Adapters that peft has made, on all matrices: their logits, loss and gradients."""
    theirs = with_drawn_adapters(made)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    adapter = adapter_sources.open_adapter(str(tmp_path / "adapter"))
    attached = attach.attach(adapter, made.model, base_fingerprint=None)

    tokens = tiny.tokens(2, LENGTH + 1)
    ids = torch.tensor(tokens).long()
    output = theirs(ids[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(
        output.reshape(-1, tiny.VOCAB), ids[:, 1:].reshape(-1)
    )
    wanted.backward()

    inputs = tiny.inputs(tokens[:, :-1])
    weights = jnp.ones(inputs.tokens_BT.shape, jnp.float32)
    batch = Batch(inputs.tokens_BT, jnp.asarray(tokens[:, 1:]), weights, *inputs[:0:-1])
    how = objective.Execution(jnp.float32, True, False, 16)

    def loss(trainable):
        total = objective.losses(
            attached.model,
            trainable,
            made.base,
            batch,
            execution=how,
            shards=parallel.NO_SHARDS,
            dropout=None,
            pool_router=False,
        )
        return total.xent / weights.sum()

    got, grads = jax.jit(jax.value_and_grad(loss))(attached.trainable)
    np.testing.assert_allclose(got, wanted.item(), rtol=1e-5)
    host = {path: np.asarray(grad) for path, grad in trees.flatten(grads).items()}
    known = record.of_model(attached.model, tiny.lora_config(), "tiny")
    ours = unroll.unrolled(host, known, path="", base_fingerprint=None).modules
    ours = with_parameters({name: dict(kinds) for name, kinds in ours.items()})
    found = compared(ours, theirs)
    adapted = [m for m in theirs.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    linear = [m for m in made.theirs.modules() if isinstance(m, torch.nn.Linear)]
    assert found == sum(map(len, ours.values())) == 2 * len(adapted)
    if made.model.config.experts is None:
        assert len(adapted) == len(linear) - 1  # All but the head.


@pytest.mark.parametrize("made", ["mixtral", "qwen3_moe", "gpt_oss"], indirect=True)
def test_load_balancing_loss_of_transformers(made):
    """Over all layers and rows together, of which one is padded; and the loss with it."""
    tokens = tiny.tokens(2, LENGTH + 1)
    mask = (np.arange(LENGTH)[None] < np.array([[LENGTH], [11]])).astype(np.int32)
    inputs = tiny.inputs(tokens[:, :-1])._replace(segment_ids_BT=jnp.asarray(mask))
    weights = jnp.asarray(mask, jnp.float32)
    batch = Batch(inputs.tokens_BT, jnp.asarray(tokens[:, 1:]), weights, *inputs[:0:-1])
    how = objective.Execution(jnp.float32, True, False, 16)
    forward = objective.make_forward(
        made.model, how, parallel.NO_SHARDS, 0.0, moe.RouterLossWeights(0.7, 0.0, is_pooled=True)
    )
    rows = {"rows_B": jnp.arange(2), "row_weight": weights.sum() / 2}
    total, found = jax.jit(lambda: forward({}, made.base, batch, key=None, **rows))()
    with torch.no_grad():
        theirs = made.theirs(
            torch.tensor(tokens[:, :-1]).long(),
            attention_mask=torch.tensor(mask).long(),
            output_router_logits=True,
        )
    np.testing.assert_allclose(found.router.balance_L / 2, [theirs.aux_loss.item()], rtol=1e-5)
    wanted = found.xent / weights.sum() + 0.7 * theirs.aux_loss.item()
    np.testing.assert_allclose(total / weights.sum(), wanted, rtol=1e-5)


def with_parameters(modules: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Gradients of experts as those of peft's parameters: two matrices have one `lora_A` there."""
    for name in [name for name in modules if name.endswith(".experts.down_proj")]:
        around = name.removesuffix(".down_proj")
        gate, up, down = (modules.pop(f"{around}.{n}_proj") for n in ("gate", "up", "down"))
        joined = {
            "lora_A": gate["lora_A"] + up["lora_A"],
            "lora_B": np.concatenate([gate["lora_B"], up["lora_B"]], axis=1),
        }
        for key, kinds in ((f"{around}.base_layer", joined), (around, down)):
            a, b = kinds["lora_A"], kinds["lora_B"]
            flat = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
            modules[key] = {"lora_A": a.reshape(-1, a.shape[2]), "lora_B": flat}
    return modules


def test_peft_loads_ours(made, tmp_path):
    """Adapters on the projections of attention, written here."""
    settings = tiny.lora_config(target_modules=("q_proj", "k_proj", "o_proj"))
    m = made.model.adapted(settings)
    adapters = tiny.adapters(m)
    host = {path: np.asarray(leaf) for path, leaf in trees.flatten(adapters).items()}
    known = record.of_model(m, settings, "tiny")
    peft_files.write(
        str(tmp_path / "a"), unroll.unrolled(host, known, path="", base_fingerprint=None)
    )
    again = type(made.theirs).from_pretrained(str(made.folder), attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(again, str(tmp_path / "a"))
    tokens = tiny.tokens(1, LENGTH)
    got = jax.jit(lambda i: m.logits(adapters, made.base, i))(tiny.inputs(tokens))
    np.testing.assert_allclose(got, their_logits(theirs, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["embed_tokens", "v_proj"]},
     {"target_modules": ["v_proj"], "trainable_token_indices": [5, 2]}],
    ids=["adapters", "rows"],
)  # fmt: skip
@pytest.mark.parametrize("made", ["gemma3"], indirect=True)
def test_what_is_trained_of_a_scaled_embedding(made, settings, tmp_path):
    """The scale is that of the whole embedding, with what an adapter adds."""
    again = type(made.theirs).from_pretrained(str(made.folder), attn_implementation="eager")
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    theirs = peft.get_peft_model(again, config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    adapter = adapter_sources.open_adapter(str(tmp_path / "adapter"))
    attached = attach.attach(adapter, made.model, base_fingerprint=None)
    tokens = tiny.tokens(2, LENGTH)
    tokens[:, 3], tokens[:, 7] = 5, 2
    run = jax.jit(lambda t, i: attached.model.logits(t, made.base, i))
    got = run(attached.trainable, tiny.inputs(tokens))
    np.testing.assert_allclose(got, their_logits(theirs, tokens), rtol=0, atol=1e-4)
