"""What would train wrongly, refused: by `parallelize`, before each step, and in the first one."""
