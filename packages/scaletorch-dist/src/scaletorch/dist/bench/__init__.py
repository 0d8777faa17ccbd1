"""Measuring every call on real ranks: `python -m scaletorch.dist.bench`."""
