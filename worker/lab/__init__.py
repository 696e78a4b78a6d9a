"""`python -m omnireduce.worker lab`: exercises of a first lesson in distributed training, on what is installed here."""
