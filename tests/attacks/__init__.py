"""Hostile peers in a loop beside an honest job, on a real daemon.

    python -m tests.attacks --seconds 600 --secret --tls      # every kind gets its share of ten minutes of attack
    python -m tests.attacks --seconds 600 --kinds "tiny blocks"

Each kind has a daemon of its own. The honest job runs alone, then beside the attacker, several times in turns, so that
a busy machine does not decide. docs/security.md says what must hold.

    steps/        the attacks: a generator for each kind, which yields a word for each step
    kinds         the table of all kinds
    target        a daemon as an attacker knows it, and connections to it
    attacker      the process that attacks, at a bounded rate
    honest        the ranks of the honest job, each a process: every sum is checked
    watch         memory of the shard, and whether /healthz answers
    testbed       a daemon, its honest job and its attacker
    campaign      kinds one after another, in phases
    verdict       measurements, bounds that must hold, the table
    buggy_daemon  runs the daemon with a deliberate bug, to show that an attack can fail the check
"""
