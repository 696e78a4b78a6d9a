"""Whole clusters in virtual time, in one process, from one seed.

What runs is the product: `ShardServer` with its admission, jobs and shard machines, `RankMachine`, `Driver` and
the rendezvous' reading of answers. What is simulated is the network (`links`), every host's clock,
the scheduling of processes, and who fails when. A run is a function of its seed, so `python -m tests.simulator --replay
N` shows again what a test reported. docs/reliability.md says what is simulated and judged.

    world      virtual time, event queue, processes that take turns, their clocks, trace
    workload   collectives, their data and their oracle
    plan       network, protocol settings, jobs and faults of a run
    draw       what a seed stands for
    shard      an aggregator shard as a process
    worker     a rank as a process: joins, runs its collectives, leaves
    stranger   somebody who connects and is no worker
    faults     what goes wrong
    tamper     messages that break one rule each
    cluster    builds a plan and runs it
    audit      what must hold inside a shard and a worker after every turn
    verdicts   never wrong, never stuck, the right culprit in time, all slots back, nothing kept
    reasons    which error may come of which fault
    campaign   many seeds in several processes, reports, replay
    mutate     puts a deliberate bug into the product and hunts it; the bugs are in mutations/
"""
