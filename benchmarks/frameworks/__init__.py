"""The service through torch and Needle, against what they have themselves."""
