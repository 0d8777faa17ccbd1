"""The ways that a tensor takes between ranks: the backend's, by levels of nodes, by host memory."""
