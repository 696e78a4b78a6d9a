"""Reports of `omnireduce status`, `doctor`, `trace` and `density`: on services, hosts, traces and saved arrays."""
