"""The program `omnireduce`, and `python -m omnireduce`: every command in one place. Only this module imports from all
parts.
"""

import sys
from pathlib import Path

here = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, here)  # a user's own worker.py is not taken for ours

from aggregator.cli import main as aggregator  # noqa: E402  see above
from omnireduce.bench.tuning.command import tune  # noqa: E402
from omnireduce.console.program import main  # noqa: E402
from omnireduce.launching.command import run  # noqa: E402
from worker.cli import main as worker  # noqa: E402

sys.path.remove(here)

main.add_command(aggregator, "aggregator")
main.add_command(run, "run")
main.add_command(tune, "tune")
for name in ("bench", "train", "allreduce-benchmark", "replay"):
    main.add_command(worker.commands[name], name)

if __name__ == "__main__":
    main(prog_name="omnireduce")
