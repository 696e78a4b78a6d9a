"""Collectives in memory that the ranks of one host share."""
