"""Whole matrices, each on the one tensor-parallel rank that updates it."""
