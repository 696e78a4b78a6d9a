"""Support for every part, apart from the method: configuration, logs, secrets, addresses, files."""
