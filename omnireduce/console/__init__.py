"""Commands of `omnireduce` for operators and studies: status, drain, doctor, trace, bench, density, plan, tune, coconet."""
