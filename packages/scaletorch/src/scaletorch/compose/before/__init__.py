"""Refusals of what would train wrongly: in `parallelize`, before each step, in the first one."""
