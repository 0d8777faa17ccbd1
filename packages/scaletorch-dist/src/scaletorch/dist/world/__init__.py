"""Who this process is, and who the others are: ranks, groups and hosts."""
