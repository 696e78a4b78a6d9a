"""The program `omnireduce`, and `python -m omnireduce`: every command in one place. Only this module imports from all
parts.
"""

from omnireduce.support.ctrl_c_at_start import slow_imports

with slow_imports():
    from omnireduce.aggregator.cli import main as aggregator
    from omnireduce.console.commands import main
    from omnireduce.console.tune.command import tune
    from omnireduce.launch.command import run
    from omnireduce.worker.cli import main as worker

main.add_command(aggregator, "aggregator")
main.add_command(run, "run")
main.add_command(tune, "tune")
for name in ("bench", "train", "allreduce-benchmark", "replay"):
    main.add_command(worker.commands[name], name)

if __name__ == "__main__":
    main(prog_name="omnireduce")
