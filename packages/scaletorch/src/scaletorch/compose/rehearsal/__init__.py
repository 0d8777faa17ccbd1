"""The rehearsal: compare a small first step with the plain module, one unit at a time."""
