"""`python -m omnireduce.aggregator`, and in a checkout `python -m aggregator`: the same as `omnireduce aggregator`."""

from omnireduce.support.ctrl_c_at_start import slow_imports

with slow_imports():
    from omnireduce.aggregator.cli import main

if __name__ == "__main__":
    main()
