"""Collectives of large tensors between processes of one host, which read one another's memory."""
