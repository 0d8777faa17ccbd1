"""Attention inside models: plain modules, and those of transformers."""
