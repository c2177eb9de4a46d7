"""What happens beside the steps: records, progress, evaluation, samples and saving."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from purelora import config, errors, generate, metrics, setup, signals, state, step
from purelora.io import tokenizer as tokenizers


class _Values(NamedTuple):
    """`step.Metrics` on the host."""

    loss_sum: float
    weight_sum: float
    grad_norm: float
    learning_rate: float
    applied: float


class _Pending(NamedTuple):
    """A step whose metrics may still be being computed."""

    step: int
    tokens: int
    metrics: step.Metrics


class Reporter:
    """Writes the run's records and shows its progress; holds no part of the training state."""

    def __init__(self, settings: config.Config):
        self._settings = settings
        self._workdir = pathlib.Path(settings.workdir)
        self._started = time.perf_counter()
        self._last = self._started
        self._pending: _Pending | None = None
        self._throughput = metrics.Throughput()
        self._skipped = 0

    def say(self, text: str) -> None:
        """Prints a line before the loop."""
        print(text, flush=True)

    @contextlib.contextmanager
    def opened(self, run: setup.Run, start: state.TrainState) -> Iterator[None]:
        """Opens metrics.jsonl and the progress bar for the time of the loop."""
        first = int(start.step)
        self._skipped = first - int(start.updates)
        self._flops_per_token = run.plan.flops_per_token
        self._prepare_workdir()
        self._log = metrics.MetricsLog(self._workdir / "metrics.jsonl")
        self._log.truncate_after(first if first else -1)
        self._progress = metrics.Progress(
            run.total_steps,
            done_steps=first,
            log_steps=self._settings.log_steps,
            peak_flops_per_sec=metrics.peak_flops_per_sec(run.plan.device_kinds),
        )
        name = "resume" if first else "start"
        self._event(first, name, f"{run.total_steps} steps in all")
        self._last = time.perf_counter()
        try:
            yield
        finally:
            self._progress.close()
            self._log.close()

    def after_step(self, number: int, batch: step.Batch, result: step.Metrics) -> None:
        """Records the step before this one, so that the host never waits for the present one."""
        self._flush()
        self._pending = _Pending(number, int((np.asarray(batch.segment_ids) > 0).sum()), result)

    def evaluate(self, run: setup.Run, current: state.TrainState, stop: signals.Stop) -> None:
        """The mean loss over all eval batches, by sums; given up when a signal asks to stop."""
        evaluation = run.data.evaluation
        if evaluation is None:
            return
        self._flush()
        start = time.perf_counter()
        sums = []
        for index in range(evaluation.steps_per_epoch):
            if stop.requested:
                return
            batch = run.place(evaluation.batch(index))
            sums.append(run.eval_step(current.trainable, run.base, batch))
        loss_sum, weight_sum = (float(np.sum([np.asarray(s[i]) for s in sums])) for i in (0, 1))
        number, secs = int(current.step), time.perf_counter() - start
        loss = loss_sum / weight_sum
        self._log.write(
            metrics.EvalRecord(
                step=number, loss=loss, trained_tokens=int(weight_sum), eval_secs=secs
            )
        )
        self._progress.write(f"eval at step {number}: loss {loss:.4f}")
        self._last = time.perf_counter()

    def sample(self, run: setup.Run, current: state.TrainState) -> None:
        """Greedy continuations of `sample_prompts`."""
        prompts = self._settings.sample_prompts
        if not prompts:
            return
        self._flush()
        tokenizer = run.model.tokenizer
        answers = generate.greedy(
            run.plan.model,
            current.trainable,
            run.base,
            [_prompt_ids(prompt, run, tokenizer) for prompt in prompts],
            end_ids=tokenizer.eos_ids,
            max_new_tokens=self._settings.sample_tokens,
            dtype=jnp.dtype(self._settings.dtype),
        )
        number = int(current.step)
        for prompt, ids in zip(prompts, answers, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            self._log.write(metrics.SampleRecord(step=number, prompt=prompt, text=text))
            self._progress.write(f"sample at step {number}: {prompt}\n  {text}")
        self._last = time.perf_counter()

    def save(self, run: setup.Run, current: state.TrainState) -> None:
        """Saves a checkpoint of the state."""
        self._flush()
        number = int(current.step)
        run.checkpoints.save(number, current, run.meta)
        self._event(number, "save", str(self._workdir / "checkpoints" / str(number)))
        self._last = time.perf_counter()

    def _flush(self) -> None:
        """Waits for the pending step and records it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = _Values(*(float(np.asarray(value)) for value in pending.metrics))
        now = time.perf_counter()
        secs, self._last = now - self._last, now
        self._skipped += int(not values.applied)
        record = self._record(pending, values, secs)
        if pending.step % self._settings.log_steps == 0 or not values.applied:
            self._log.write(record)
        self._progress.update(record)
        if not values.applied:
            self._report_skip(pending.step, values)

    def _record(self, pending: _Pending, values: _Values, secs: float) -> metrics.TrainRecord:
        trained = int(values.weight_sum)
        rates = self._throughput.add(
            tokens=pending.tokens,
            trained_tokens=trained,
            flops=pending.tokens * self._flops_per_token,
            secs=secs,
        )
        return metrics.TrainRecord(
            step=pending.step,
            loss=values.loss_sum / values.weight_sum if values.weight_sum else float("nan"),
            tokens=pending.tokens,
            trained_tokens=trained,
            **rates._asdict(),
            learning_rate=values.learning_rate,
            grad_norm=values.grad_norm,
            applied=bool(values.applied),
            skipped_steps=self._skipped,
            step_secs=secs,
            peak_memory_bytes=metrics.peak_memory_bytes(),
            elapsed_secs=time.perf_counter() - self._started,
        )

    def _report_skip(self, number: int, values: _Values) -> None:
        """Says why an update was not made; ends the run where that is the policy."""
        if not values.weight_sum:
            self._event(number, "skip", "no token of the batch has weight")
            return
        detail = f"loss sum {values.loss_sum}, gradient norm {values.grad_norm}"
        self._event(number, "skip", f"not finite: {detail}")
        if self._settings.nan_policy == "abort":
            raise errors.DivergedError(
                f"step {number}",
                None,
                f"is not finite: {detail}",
                "lower optim.learning_rate, or set nan_policy='skip' to leave such batches out; "
                "the last checkpoint is from before this step",
            )

    def _event(self, number: int, name: str, detail: str) -> None:
        self._log.write(metrics.EventRecord(step=number, name=name, detail=detail))
        self._progress.write(f"{name} at step {number}: {detail}")

    def _prepare_workdir(self) -> None:
        """Makes the folder and writes the resolved configuration into it."""
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            text = json.dumps(config.as_flat(self._settings), indent=1)
            (self._workdir / "config.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise errors.ConfigError(
                "workdir",
                str(self._workdir),
                f"cannot be written: {error}",
                "choose another folder",
            ) from error


def _prompt_ids(prompt: str, run: setup.Run, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """A prompt as the user's turn of a chat, or as it is where there is no template."""
    if run.data.template is None or run.settings.task == "pretrain":
        return list(tokenizer.encode(prompt, add_special_tokens=True).ids)
    text = run.data.template.render(
        [{"role": "user", "content": prompt}],
        tools=None,
        add_generation_prompt=True,
        where="sample_prompts",
    )
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
