"""What the environment says of this process: its launcher, its place, its network."""
