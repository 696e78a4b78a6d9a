"""`python -m omnireduce`."""

from omnireduce.console.program import main

main()
