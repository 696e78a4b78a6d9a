"""Compilation of kernels: decorators, the cache on disk, and what is compiled before a job."""
