"""How a worker, the console and the daemon's monitor reach an aggregator and ask it something."""
