"""The way that a tensor takes between ranks: its group's backend."""
