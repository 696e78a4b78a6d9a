"""Real faults: daemons and workers as processes, ended and stopped by signals at moments that follow from a seed.

    python -m tests.faults --rounds 300 --seed 0      # a line for each round; a failure prints the command for it alone
    python -m tests.faults soak --jobs 3000           # jobs in parallel and in sequence, descriptors and memory flat

What the simulator (`tests/simulator`) cannot have is here: sockets, threads, the supervisor, and the kernel that closes
what a process leaves behind. docs/reliability.md says what is judged.

    plan       what a seed stands for: a job, its workload, and the fault that it meets
    worker     a rank as a process: runs jobs as it is told
    crew       such processes, forked where everything is imported already
    site       a daemon with jobs that nothing may disturb, and what it holds when it is at rest
    rounds     carries out a plan and judges what came of it
    campaign   many rounds, and their totals
    soak       thousands of jobs on one daemon
"""
