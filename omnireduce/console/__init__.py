"""The program `omnireduce`: what operators ask of a running service."""
