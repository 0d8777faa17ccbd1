"""What surrounds the sharded layers: communication, replicas, random draws."""
