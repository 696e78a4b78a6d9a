"""What data-parallel programs need on top of a communicator: collectives that ranks submit in any order, by name."""
