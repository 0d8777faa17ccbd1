"""Two recordings beside one another: places, wholes, bounds, and where faults begin."""
