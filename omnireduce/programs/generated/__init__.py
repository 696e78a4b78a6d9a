"""A program as a Python file that runs by itself, and that a person can read.

statements   expressions as Python
parts        one rank's side: a function for each pass, and a step as a row of them
oracle       what the program means, on whole tensors: the file compares itself with that
declared     the program in its own language, for a file whose fused AllReduce runs on the shards
source       the file
file.jinja   the frame of it; job.jinja: a job over omnireduce or over mpi4py

A line is at most 88 characters long, and what is longer is broken where a formatter would break it at any width.
"""
