"""Where a plain module is cut, and how its stages come to be."""
