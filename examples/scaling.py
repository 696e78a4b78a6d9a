"""The speedup by more ranks: a table of the seconds of a program that prints "Total time: S second".

python scaling.py --np 1,2,4,8 python keras_warmup.py --epochs 4
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROGRAM = str(Path(sys.executable).parent / "omnireduce")


def seconds_of(ranks: int, command: list[str]) -> float:
    """Run the command on so many ranks; what it prints is printed."""
    completed = subprocess.run(
        [PROGRAM, "run", "-np", str(ranks), *command], stdout=subprocess.PIPE, text=True, check=False
    )
    sys.stdout.write(completed.stdout)
    sys.stdout.flush()
    if completed.returncode:
        sys.exit(f"{ranks} ranks ended with status {completed.returncode}")
    match = re.search(r"Total time: ([0-9.]+) second", completed.stdout)
    if match is None:
        sys.exit(f"{ranks} ranks have not said 'Total time: S second'")
    return float(match[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="How much faster more ranks are.")
    parser.add_argument("--np", default="1,2,4,8", help="numbers of ranks, with commas between them")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    arguments = parser.parse_args()
    try:
        numbers = [int(text) for text in arguments.np.split(",")]
    except ValueError:
        parser.error(f"--np {arguments.np}: expected numbers with commas between them, such as 1,2,4")
    if not arguments.command or min(numbers) < 1:
        parser.error("expected a program to run, and numbers of ranks from 1")
    times = {ranks: seconds_of(ranks, arguments.command) for ranks in numbers}
    table = Table("ranks", "seconds", "times as fast", "of what ranks could", box=None)
    for ranks, seconds in times.items():
        speed = times[numbers[0]] / seconds
        table.add_row(f"{ranks}", f"{seconds:.2f}", f"{speed:.2f}", f"{speed * numbers[0] / ranks:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
