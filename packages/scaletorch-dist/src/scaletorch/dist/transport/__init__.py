"""How tensors travel between ranks: directly by the backend, or hierarchically over nodes."""
