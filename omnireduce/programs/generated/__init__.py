"""A program as a Python file that runs by itself, and that a person can read.

statements   expressions as Python
rank_side    one rank's side: a function for each pass, and a step as a row of them
oracle       the meaning of the program, on whole tensors: the file compares itself with that
source       the file, with the program in its own language if its fused AllReduce runs on the shards
file.jinja   the frame of it; job.jinja: a job over omnireduce or over mpi4py

A line is at most 88 characters long, and what is longer is broken where a formatter would break it at any width.
"""
