"""A tensor on a backend: packing it, the backend's own calls, waiting, and who is told of calls."""
