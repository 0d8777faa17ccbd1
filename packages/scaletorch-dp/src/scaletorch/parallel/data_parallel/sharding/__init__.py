"""ZeRO: every rank updates its part of the parameters, and keeps the optimizer's state of it."""
