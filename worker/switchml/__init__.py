"""The programs of SwitchML's tutorial, on `omnireduce.switchml`: `allreduce-benchmark` and `replay`."""
