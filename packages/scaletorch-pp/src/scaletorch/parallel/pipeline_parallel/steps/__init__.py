"""One step: its micro-batches, what its actions do, its loss and its times."""
