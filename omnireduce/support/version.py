"""The version of omnireduce."""

__version__ = "0.1.0"
