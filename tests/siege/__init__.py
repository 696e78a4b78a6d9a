"""A siege: a hostile peer in a loop beside an honest job, on a real daemon.

    python -m tests.siege --seconds 600 --secret --tls      # every kind gets its share of ten minutes of attack
    python -m tests.siege --seconds 600 --kinds "tiny blocks"

Each kind has a daemon of its own. The honest job runs alone, then beside the attacker, several times in turns, so that
a busy machine does not decide. docs/security.md says what must hold.

    attacks/   what an attacker does: a generator for each kind, which yields a word for each stroke
    kinds      the table of all kinds
    target     what an attacker knows of a daemon, and its connections
    attacker   the process that strikes, at a bounded rate
    honest     the ranks of the honest job, each a process: every sum is checked
    watch      memory of the shard, and whether /healthz answers
    field      a daemon, its honest job and its attacker
    campaign   kinds one after another, in phases
    verdict    what was measured, what must hold, the table
    spoiled    runs the daemon with a deliberate bug, to show that a siege can fail
"""
