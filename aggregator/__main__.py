"""`python -m aggregator`: the same as `omnireduce aggregator`."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the daemon takes signals: the imports below take a while

from aggregator.cli import main  # noqa: E402  see above

if __name__ == "__main__":
    main()
