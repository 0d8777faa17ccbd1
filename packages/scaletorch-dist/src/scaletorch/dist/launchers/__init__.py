"""Facts from the environment about this process: its launcher, its rank, its network."""
