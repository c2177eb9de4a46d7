"""Training beside PEFT on SmolLM2: the same adapters and batches give the same losses."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from purelora.config import command_line
from purelora.core import trees
from purelora.formats import source
from purelora.interop import builtin
from purelora.interop.peft import artefact, record, unroll
from purelora.interop.peft import files as peft_files
from purelora.training import feed, setup
from tests.support import tiny

REPO = pathlib.Path(__file__).parents[2]
STEPS = 20
COMMON = (
    f"--config={REPO}/configs/qlora.py",
    f"--config.steps={STEPS}",
    "--config.quant.qtype=none",
    "--config.batch_size=2",
    "--config.max_length=48",
    "--config.data.packing=False",
    "--config.data.too_long=truncate",
    "--config.optim.learning_rate=3e-4",
    "--config.data.eval_fraction=0",
    "--config.lora.r=8",
    "--config.lora.lora_alpha=16",
    "--config.optim.schedule=constant",
    "--config.optim.warmup_steps=0",
    "--config.optim.weight_decay=0.1",
)
VARIANTS = {
    "lora": (),
    "rslora": ("--config.lora.use_rslora=True", "--config.optim.learning_rate=1e-4"),
    "dora": ("--config.lora.use_dora=True", "--config.lora.target_modules=q_proj,v_proj,up_proj"),
    "rank_pattern": (
        "--config.lora.rank_pattern={'k_proj': 2, 'layers.3.mlp.up_proj': 12}",
        "--config.lora.alpha_pattern={'v_proj': 4.0}",
        "--config.optim.loraplus_lr_ratio=4",
    ),
}

pytestmark = [
    pytest.mark.usefixtures("fully_compiled"),
    pytest.mark.reference,
    pytest.mark.download,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    opened = source_of()
    return {name: opened.read(name).array.astype(np.float32) for name in opened.shapes()}


def source_of() -> source.Source:
    return builtin.open_model("smollm2-135m").source


def torch_model(weights: dict[str, np.ndarray]):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    options = dict(source_of().config)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    state = {name: torch.tensor(array) for name, array in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def run_with_torch(model: Any, run: setup.Run) -> list[float]:
    """The losses of plain AdamW with LoRA+'s two rates, as PEFT's users train."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # Two would wait for each other at every operation on a busy machine.
    optim = run.settings.optim
    groups: dict[tuple[float, float], list[Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            faster = "lora_B" in name or parameter.ndim == 1
            rate = optim.learning_rate * (optim.loraplus_lr_ratio if faster else 1)
            decay = optim.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((rate, decay), []).append(parameter)
    options = {"betas": (optim.b1, optim.b2), "eps": optim.eps}
    adamw = torch.optim.AdamW(
        [{"params": p, "lr": lr, "weight_decay": decay} for (lr, decay), p in groups.items()],
        **options,
    )
    losses = []
    for step in range(STEPS):
        batch = [torch.tensor(np.asarray(a)[0]) for a in run.data.train.batch(step)]
        tokens, targets, token_weights, segments, _ = batch
        logits = model(tokens.long(), attention_mask=(segments > 0).long()).logits
        nll = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.long().flatten(), reduction="none"
        )
        loss = (nll * token_weights.flatten()).sum() / token_weights.sum()
        loss.backward()
        if optim.clip_norm is not None:
            parameters = [p for group in groups.values() for p in group]
            torch.nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("variant", tiny.with_slow(VARIANTS, ["rslora"]))
def test_losses_and_adapters_are_those_of_peft(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, weights: Any, variant: str
):
    peft = pytest.importorskip("peft")
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    arguments = [*COMMON, f"--config.workdir={tmp_path / 'run'}", *VARIANTS[variant]]
    settings = command_line.parse(arguments, flags=()).config
    run, state = setup.build(*setup.open_and_plan(settings, str), str)

    known = record.of_model(run.plan.model, settings.lora, "smollm2-135m")

    def adapter(trainable: trees.Tree) -> artefact.Adapter:
        leaves = {path: np.array(leaf) for path, leaf in trees.flatten(trainable).items()}
        return unroll.unrolled(leaves, known, path="run", base_fingerprint=None)

    peft_files.write(str(tmp_path / "start"), adapter(state.trainable))
    model = peft.PeftModel.from_pretrained(
        torch_model(weights), str(tmp_path / "start"), is_trainable=True
    )
    theirs = run_with_torch(model.train(), run)
    ours = []
    for fed in feed.feed(run.data.train, run.plan.mesh, range(1, STEPS + 1)):
        state, metrics = run.train_step(state, run.base, fed.batch)
        ours.append(float(metrics.loss_sum / metrics.weight_sum))
    # A loss near zero is a difference of logits of 20, which float32 holds to a millionth or two.
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-6)
    assert ours[-1] != ours[0]

    model.save_pretrained(str(tmp_path / "end"))
    want, got = peft_files.read(str(tmp_path / "end")), adapter(state.trainable)
    pairs = [
        (array, want.modules[name][kind])
        for name, kinds in got.modules.items()
        for kind, array in kinds.items()
    ]
    whole = np.hypot.reduce([np.linalg.norm(a - b) for a, b in pairs])
    assert whole < 1e-3 * np.hypot.reduce([np.linalg.norm(b) for _, b in pairs])
    # In a few tensors elements with gradients near Adam's epsilon differ by rounding alone.
    assert all(np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b) for a, b in pairs)
    assert dataclasses.asdict(want.config)["r"] == settings.lora.r
