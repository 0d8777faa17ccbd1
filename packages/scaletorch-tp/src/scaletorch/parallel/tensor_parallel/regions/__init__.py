"""Code around the sharded layers: regions, sequence shards, replicas, random streams."""
