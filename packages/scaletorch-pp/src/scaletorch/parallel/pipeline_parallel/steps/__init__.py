"""One step: its micro-batches, the computation of its actions, and its loss."""
