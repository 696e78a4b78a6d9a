"""Which schedule of a program is the fastest, and where.

candidates   the ways in which a program can be done
trials       one way, on this rank
memory       what was found out before, in a file
autotune     measure, choose, remember
"""
