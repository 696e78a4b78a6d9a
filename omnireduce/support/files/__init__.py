"""Files of users: arrays that are read, results that are written."""
