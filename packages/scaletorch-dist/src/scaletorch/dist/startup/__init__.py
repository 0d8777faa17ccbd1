"""The start of a rank: the meeting point, the roll call, the default group."""
