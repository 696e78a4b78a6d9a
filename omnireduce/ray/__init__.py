"""`omnireduce.ray.run`: ranks and aggregators as actors of a Ray cluster."""

from omnireduce.support.extras import need

need("ray", "omnireduce.ray", "ray")  # before what fails without it

from omnireduce.ray.actors import run

__all__ = ["run"]
