"""Calls of collectives, ready to start: checked arguments, data to send, and what becomes of the result."""
