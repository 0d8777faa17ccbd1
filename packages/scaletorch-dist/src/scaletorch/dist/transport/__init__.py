"""Transport of tensors between ranks: directly by the backend, or hierarchically over nodes."""
