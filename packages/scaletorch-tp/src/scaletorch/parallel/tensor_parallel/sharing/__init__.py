"""Sequences that ranks share between regions, and gradients that they sum."""
