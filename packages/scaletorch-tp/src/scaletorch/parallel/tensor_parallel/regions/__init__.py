"""Code around the sharded layers: regions, sequence shards, random streams."""
