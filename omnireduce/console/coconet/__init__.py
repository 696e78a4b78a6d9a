"""`omnireduce coconet`: programs of several ranks, from the command line."""
