"""Autotuning of a program: finds its fastest schedule for each size.

candidates   the possible ways to run a program
trials       one way, timed on this rank
memory       earlier results, in files
autotune     measure, choose, remember
"""
