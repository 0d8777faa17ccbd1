"""Modules around the sharded layers: communication, replicas, random draws."""
