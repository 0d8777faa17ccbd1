"""Splitting of a plain module: the points to cut it at, and the modules of each stage."""
