"""`omnireduce tune`: the configuration with which this machine moves a step's arrays fastest.

The ranks are real processes, and so are the aggregators. Each sample is a configuration. Its ranks form a job of their
own, beside a job of the configuration that is there already. Both take turns, round by round, so that whatever else
the machine does disturbs both alike. What counts is the ratio of their times.

command    the command line
session    a rank: it measures samples and prints
search     the keys that are tuned, the race of two configurations, and the choice of the next sample (rank 0 alone)
workload   the arrays that are summed
report     the log, the table, and the file that is written
"""
