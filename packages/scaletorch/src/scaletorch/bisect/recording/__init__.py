"""Recordings of a step by ranks, with descriptions of their shards of batch and model."""
