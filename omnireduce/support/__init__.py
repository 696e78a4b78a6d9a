"""What every part needs and what is no part of the method: configuration, logs, secrets, addresses, files."""
