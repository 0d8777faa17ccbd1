"""Checks on a GPU: tests, proofs, faults and figures; each group has its own process."""
