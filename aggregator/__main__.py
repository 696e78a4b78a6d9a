"""`python -m omnireduce.aggregator`, and in a checkout `python -m aggregator`: the same as `omnireduce aggregator`."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the slow imports below; later the daemon handles it

from omnireduce.aggregator.cli import main  # noqa: E402  see above

if __name__ == "__main__":
    main()
