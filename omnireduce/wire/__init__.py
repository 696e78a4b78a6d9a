"""What travels between workers and aggregators: block messages and control messages."""
