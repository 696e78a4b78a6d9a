"""`omnireduce tune`: the configuration with which this machine moves a step's arrays fastest.

The ranks are real processes, and so are the aggregators. Each sample is a configuration. Its ranks form a job of their
own, beside a job of the configuration that is there already. Both take turns, round by round, so that whatever else
the machine does disturbs both alike. What counts is the ratio of their times.

`command` reads the command line and starts the ranks, `session` is a rank, `space` says what is tuned, `workload` what
is summed, `race` measures, `search` chooses what is measured next (rank 0 alone), `report` writes what was found.
"""
