"""Wire format of the messages between workers and aggregators: block messages and control messages."""
