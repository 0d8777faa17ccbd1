"""ZeRO: each rank updates its shards of the parameters and keeps their optimizer state."""
