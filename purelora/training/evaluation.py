"""Looking at a state without changing it: the loss on the eval data, and samples."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import errors, train_state
from purelora.models import decode
from purelora.training import metrics, setup, signals


def evaluate(
    run: setup.Run, current: train_state.TrainState, stop: signals.Stop
) -> metrics.EvalRecord | None:
    """The mean loss over all eval batches, by sums.

    Returns:
      None without eval data, and when a signal asks to stop meanwhile.
    """
    evaluation = run.data.evaluation
    if evaluation is None:
        return None
    start = time.perf_counter()
    totals, pending = np.zeros(2, np.float64), None
    for index in range(evaluation.steps_per_epoch):
        stop.look()
        if stop.requested:
            return None
        batch = run.place(run.batch(evaluation, index))
        # One batch is computed while the next is prepared; with more queued, a signal would wait.
        done, pending = pending, run.eval_step(current.trainable, run.base, batch)
        totals += _on_host(done)
    loss_sum, weight_sum = totals + _on_host(pending)
    return metrics.EvalRecord(
        step=int(current.step),
        loss=float(loss_sum / weight_sum),
        trained_tokens=int(weight_sum),
        eval_secs=time.perf_counter() - start,
    )


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
        [prompt_ids(run, prompt) for prompt in prompts],
        end_ids=tokenizer.eos_ids,
        max_new_tokens=run.settings.sample_tokens,
        dtype=jnp.dtype(run.settings.dtype),
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    return [
        metrics.SampleRecord(step=int(current.step), prompt=prompt, text=text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def prompt_ids(run: setup.Run, prompt: str) -> list[int]:
    """A prompt as the user's turn of a chat, or as it is where there is no template.

    Raises:
      ConfigError: it has no token.
    """
    text = prompt
    if run.data.template is not None and run.settings.task == "sft":
        text = run.data.template.render(
            [{"role": "user", "content": prompt}],
            tools=None,
            add_generation_prompt=True,
            where="sample_prompts",
        )
    # As for the training data: the tokenizer adds a BOS unless the text begins with one.
    ids = list(run.model.tokenizer.encode(text, add_special_tokens=True).ids)
    if not ids:
        raise errors.ConfigError("sample_prompts", prompt, "has no token", "remove it")
    return ids
