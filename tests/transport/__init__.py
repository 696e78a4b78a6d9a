"""One suite for every transport, and what is special about each."""
