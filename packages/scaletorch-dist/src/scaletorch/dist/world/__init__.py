"""Ranks, groups and hosts."""
