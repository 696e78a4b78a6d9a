"""The worker program: benchmark, training and density report on top of the library."""
