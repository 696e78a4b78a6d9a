"""Programs that run as ranks: trainings, the benchmarks of SwitchML, exercises."""
