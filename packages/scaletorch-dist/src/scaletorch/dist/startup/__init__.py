"""How a process becomes a rank: the meeting point, the roll call, the default group."""
