"""Cost model of an all-reduce on hosts that need not exist, for `omnireduce plan`."""
