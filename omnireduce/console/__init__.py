"""What `omnireduce status`, `doctor`, `trace` and `density` show: of services, hosts, traces and saved arrays."""
