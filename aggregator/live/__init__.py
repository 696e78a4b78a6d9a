"""The page of a daemon that a browser shows."""
