"""The program `omnireduce`, and `python -m omnireduce`: every command in one place. Only this module imports from all
parts.
"""

import signal
import sys
from pathlib import Path

at_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the imports below take their time
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a user's own worker.py is not taken for ours

from aggregator.cli import main as aggregator  # noqa: E402  see above
from omnireduce.console.program import main  # noqa: E402
from worker.cli import main as worker  # noqa: E402

del sys.path[0]
signal.signal(signal.SIGINT, at_ctrl_c)

main.add_command(aggregator, "aggregator")
for name, command in worker.commands.items():
    main.add_command(command, name)

if __name__ == "__main__":
    main(prog_name="omnireduce")
