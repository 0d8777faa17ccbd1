"""Styles that say how parameters are cut."""
