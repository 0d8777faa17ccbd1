"""A run proves itself: its first step, small, beside the plain module, one unit at a time."""
