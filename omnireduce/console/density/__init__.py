"""`omnireduce density`: whether the service would help with saved arrays."""
