"""Fine-tunes a language model: the main command.

    python -m purelora.train --config=configs/qlora.py
    python -m purelora.train --config=configs/qlora.py --config.lora.r=8 --config.workdir=runs/r8
    python -m purelora.train --config=configs/qlora.py --plan

--config=FILE        a config file; configs/base.py documents every key
--config.KEY=VALUE   overrides a key
--plan               prints the resolved configuration and every array, and stops

Exit status: 0 when the run is complete, 2 for an error that the user can mend, 128 + signal when
SIGTERM or SIGINT ended it (after saving).
"""

from collections.abc import Sequence

from purelora import cli, compilation, config, plan, reporting, setup, signals, state


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    settings, flags = cli.parse(argv, flags=("plan",))
    cache = compilation.use_cache(settings.compile_cache)
    reporter = reporting.Reporter(settings)
    model, run_plan = setup.open_and_plan(settings, reporter.say)
    if "plan" in flags:
        print(f"{cli.describe(config.as_flat(settings))}\n\n{plan.table(run_plan)}\n")
        print(run_plan.describe_targets())
        return 0
    reporter.say(f"compilation cache: {cache or 'off'}")
    run, start = setup.build(model, run_plan, reporter.say)
    if int(start.step) >= run.total_steps:
        reporter.say(f"complete: {settings.workdir} is at step {run.total_steps} already")
        return 0
    with signals.catch() as stop, reporter.opened(run, start):
        train(run, start, reporter, stop)
    return stop.status


def train(
    run: setup.Run, current: state.TrainState, reporter: reporting.Reporter, stop: signals.Stop
) -> state.TrainState:
    """The loop: steps until the last one or until a signal asks to stop; saves at the end."""
    first = int(current.step)
    if first == 0:
        reporter.evaluate(run, current, stop)
        reporter.sample(run, current)
    for index in range(first, run.total_steps):
        batch = run.data.train.batch(index)
        current, metrics = run.train_step(current, run.base, run.place(batch))
        reporter.after_step(index + 1, batch, metrics)
        is_last = stop.requested or index + 1 == run.total_steps
        if not stop.requested and (is_last or run.is_due(index + 1, run.settings.eval_steps)):
            reporter.evaluate(run, current, stop)
        if is_last or run.is_due(index + 1, run.settings.checkpoint.save_steps):
            reporter.save(run, current)
        if is_last:
            break
    if not stop.requested:
        reporter.sample(run, current)
    return current


if __name__ == "__main__":
    cli.run_command(main, __doc__)
