"""Commands for operators and for studies: status, drain, doctor, trace, bench, density, plan, tune, coconet."""
