"""Collectives of Python objects, and their serialization."""
