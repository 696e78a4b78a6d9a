"""Measurements of omnireduce, beside what a user would pick instead, and beside itself: `python -m benchmarks --help`.

harness/      processes of ranks and daemons, hosts with shaped links, what carries bytes, verdicts
contest/      all-reduces of dense and sparse tensors against MPICH, Open MPI and gloo, and against the bounds of links
parts/        one part of the service beside another way: codecs, selection, queues, threads, updates on the shards
programs/     programs of computation and communication; CoCoNet's experiments
frameworks/   through torch and Needle
rdma          RDMA beside ib_write_bw

A case says what is exchanged, by whom and over what (`contest.cases`). A peer is a group of ranks (`harness.group`) and
its methods (`contest.contest`). A target is a verdict (`harness.verdicts`). A comparison of two ways is an entry of
`comparisons`. `rank` and `peak_memory` stay where an older checkout has them: `compare` runs those of both.
"""
