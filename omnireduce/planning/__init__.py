"""How long an all-reduce would take, on hosts that need not exist: what `omnireduce plan` asks."""
