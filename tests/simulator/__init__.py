"""Whole clusters in virtual time, in one process, from one seed.

What runs is the product: `ShardServer` with its membership, jobs and aggregator machines, `WorkerMachine`, `Driver` and
the rendezvous' reading of answers. What is simulated is the network (`omnireduce.transport.sim`), the clock, the
scheduling of processes, and who fails when. A run is a function of its seed, so `python -m tests.simulator --seed N`
shows again what a test reported.

    world      virtual clock, event queue, processes that take turns, trace
    workload   collectives with exact results, and their oracle
    plan       what a seed stands for: cluster, network, jobs, faults
    shard      an aggregator shard as a process
    worker     a rank as a process: joins, runs its collectives, leaves
    faults     what goes wrong
    cluster    builds a plan and runs it
    verdicts   never wrong, never stuck, the right culprit in time, all slots back, nothing kept
"""
