"""How a process becomes a rank: launchers' environments, the meeting point, the default group."""
