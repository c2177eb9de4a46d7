"""Fine-tunes a language model: the main command.

    python -m purelora.train --config=configs/qlora.py
    python -m purelora.train --config=configs/qlora.py --config.lora.r=8 --config.workdir=runs/r8
    python -m purelora.train --config=configs/qlora.py --plan

--config=FILE        a config file; configs/base.py documents every key
--config.KEY=VALUE   overrides a key
--plan               prints the resolved configuration and every array, and stops

Exit status: 0 when the run is complete, 2 for an error that the user can fix, 128 + signal when
SIGTERM or SIGINT ended it (after saving).
"""

from collections.abc import Sequence

from purelora import (
    assembly,
    cli,
    compilation,
    config,
    evaluation,
    plan,
    reporting,
    signals,
    state,
)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    settings, flags = cli.parse(argv, flags=("plan",))
    if "plan" not in flags:
        reporting.check_workdir(settings)
    cache = compilation.use_cache(settings.compile_cache)
    model, run_plan = assembly.open_and_plan(settings, reporting.say)
    if "plan" in flags:
        print(f"{cli.describe(config.as_flat(settings))}\n\n{plan.table(run_plan)}\n")
        print(run_plan.describe_targets())
        return 0
    reporting.say(f"compilation cache: {cache or 'off'}")
    run, start = assembly.build(model, run_plan, reporting.say)
    if int(start.step) >= run.total_steps:
        reporting.say(f"complete: {settings.workdir} is at step {int(start.step)} already")
        return 0
    with signals.catch() as stop, reporting.reporting(run, start) as reporter:
        train(run, start, reporter, stop)
    return stop.status


def train(
    run: assembly.Run, current: state.TrainState, reporter: reporting.Reporter, stop: signals.Stop
) -> state.TrainState:
    """The loop: steps until the last one or until a signal asks to stop; saves at the end."""
    every = run.settings
    first = int(current.step)
    if first == 0:
        reporter.evaluated(evaluation.evaluate(run, current, stop))
        reporter.sampled(evaluation.sample(run, current))
    for number in range(first + 1, run.total_steps + 1):
        batch = run.data.train.batch(number - 1)
        current, metrics = run.train_step(current, run.base, run.place(batch))
        reporter.after_step(number, batch, metrics)
        is_last = stop.requested or number == run.total_steps
        if is_last or is_due(number, every.eval_steps):
            reporter.flush()
            reporter.evaluated(evaluation.evaluate(run, current, stop))
        if is_last or is_due(number, every.checkpoint.save_steps):
            reporter.flush()
            run.checkpoints.save(number, current, run.meta)
            reporter.event(number, "save", f"{every.workdir}/checkpoints/{number}")
        if is_last:
            break
    if not stop.requested:
        reporter.sampled(evaluation.sample(run, current))
        reporter.finish(current)
    return current


def is_due(number: int, every: int | None) -> bool:
    """Whether something that is done every so many steps is done after step `number`."""
    return every is not None and number % every == 0


if __name__ == "__main__":
    cli.run_command(main, __doc__)
