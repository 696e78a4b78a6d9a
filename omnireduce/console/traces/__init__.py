"""`omnireduce trace`: what each rank and shard of a traced job did when."""
