"""Running the service: launchers, drivers and the public communicator."""
