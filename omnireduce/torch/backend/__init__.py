"""The backend "omnireduce" of torch.distributed: process groups whose collectives the aggregators serve."""
