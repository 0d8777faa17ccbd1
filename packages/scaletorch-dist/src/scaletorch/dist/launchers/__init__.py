"""Read a process's launcher, rank and network interface from its environment."""
