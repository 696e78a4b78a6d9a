"""`python -m omnireduce.worker`, and in a checkout `python -m worker`: those commands of `omnireduce` that are a
worker's.
"""

from omnireduce.support.ctrl_c_at_start import slow_imports

with slow_imports():
    from omnireduce.worker.cli import main

if __name__ == "__main__":
    main()
