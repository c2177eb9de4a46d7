"""Looking at a state without changing it: the loss on the eval data, and samples."""

import time
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from purelora.config import schema
from purelora.core import errors, train_state, trees
from purelora.core.batch import Batch
from purelora.data import chat
from purelora.models import decode
from purelora.training import feed, metrics, setup, signals
from purelora.training.step import EvalStep
from purelora.weights.tokenizer import Tokenizer


def evaluate(
    run: setup.Run, current: train_state.TrainState, stop: signals.Stop
) -> metrics.EvalRecord | None:
    """The mean loss over all eval batches, by sums.

    Returns:
      None without eval data, and when a signal asks to stop meanwhile.
    """
    batches = run.data.evaluation
    if batches is None:
        return None
    start = time.perf_counter()

    def numbers() -> Iterator[int]:
        for number in range(1, batches.steps_per_epoch + 1):
            stop.poll()
            if stop.requested:
                return
            yield number

    fed = (item.batch for item in feed.feed(batches, run.plan.mesh, numbers()))
    loss_sum, weight_sum = loss_sums(run.eval_step, current.trainable, run.base, fed)
    if stop.requested:
        return None
    return metrics.EvalRecord(
        step=int(current.step),
        loss=float(loss_sum / weight_sum),
        trained_tokens=int(weight_sum),
        eval_secs=time.perf_counter() - start,
    )


def loss_sums(
    eval_step: EvalStep, trainable: trees.Tree, base: trees.Tree, batches: Iterable[Batch]
) -> np.ndarray:
    """Sums over placed batches, float64: of the weighted token losses, and of the weights.

    One batch is computed while the next is prepared; with more queued, a signal would wait.
    """
    totals, pending = np.zeros(2, np.float64), None
    for batch in batches:
        done, pending = pending, eval_step(trainable, base, batch)
        totals += _on_host(done)
    return totals + _on_host(pending)


def _on_host(sums: tuple[jax.Array, jax.Array] | None) -> np.ndarray:
    return np.zeros(2) if sums is None else np.array([float(np.asarray(s)) for s in sums])


def sample(run: setup.Run, current: train_state.TrainState) -> list[metrics.SampleRecord]:
    """Greedy continuations of `sample_prompts`."""
    prompts = run.settings.sample_prompts
    if not prompts:
        return []
    tokenizer = run.model.tokenizer
    answers = decode.complete(
        run.plan.model,
        current.trainable,
        run.base,
        [prompt_ids(run.plan.config, tokenizer, run.data.template, prompt) for prompt in prompts],
        end_ids=tokenizer.eos_ids,
        max_new_tokens=run.settings.sample_tokens,
        dtype=jnp.dtype(run.settings.dtype),
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    return [
        metrics.SampleRecord(step=int(current.step), prompt=prompt, text=text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def prompt_ids(
    settings: schema.Config,
    tokenizer: Tokenizer,
    template: chat.ChatTemplate | None,
    prompt: str,
) -> list[int]:
    """A prompt as the user's turn of a chat, or as it is where there is no template.

    Raises:
      ConfigError: it has no token.
    """
    text = prompt
    if template is not None and settings.task == "sft":
        text = template.render(
            [{"role": "user", "content": prompt}],
            tools=None,
            add_generation_prompt=True,
            where="sample_prompts",
        )
    # As for the training data: the tokenizer adds a BOS unless the text begins with one.
    ids = list(tokenizer.encode(text, add_special_tokens=True).ids)
    if not ids:
        raise errors.ConfigError("sample_prompts", prompt, "has no token", "remove it")
    return ids
