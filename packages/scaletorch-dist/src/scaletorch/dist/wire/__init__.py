"""The backend layer: packing tensors, the backend's raw calls, checks, Work, and the guard hook."""
