"""Files of a checkpoint: what is written, in which folders, and what is taken of it."""
