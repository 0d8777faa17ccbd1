"""Families under transformers' own tensor parallelism, recorded and compared: `__main__`."""
