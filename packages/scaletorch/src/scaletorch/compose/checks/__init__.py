"""Checks that refuse wrong training: in `parallelize`, before each step, and in the first step."""
