"""Facts about this process and the others: ranks, groups and hosts."""
