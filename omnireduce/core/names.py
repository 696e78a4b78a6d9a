"""Names of jobs, launches and teams: the allowed characters, for peers' messages and for the configuration."""

from __future__ import annotations

TEAM_CHARACTERS = 64
TEAM_PATTERN = rf"^[A-Za-z0-9_-]{{0,{TEAM_CHARACTERS}}}\Z"
TEAM_ALLOWED = f'a string of up to {TEAM_CHARACTERS} characters out of A-Z a-z 0-9 _ -; "" for none'

JOB_PATTERN = r"^[A-Za-z0-9._:@+-]{1,128}\Z"
JOB_ALLOWED = "a string of 1 to 128 characters out of A-Z a-z 0-9 . _ : @ + -"
URGENT = "+urgent"  # the name of a job with this behind it is the name of its channel for urgent tensors

LAUNCH_PATTERN = r"^[A-Za-z0-9._:@+-]{0,128}\Z"
