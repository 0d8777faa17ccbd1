"""One step: its micro-batches, the work of its actions, its loss and its times."""
