"""ZeRO: each rank updates its shards of the parameters and keeps the optimizer's state of them."""
