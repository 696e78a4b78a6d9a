"""Requests to aggregators, from workers, the console and the daemon's monitor: connect, prove a secret, ask."""
