"""Styles that say how parameters are sharded."""
