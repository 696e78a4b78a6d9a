"""`python -m worker`: those commands of `omnireduce` that are a worker's."""

from worker.cli import main

main()
