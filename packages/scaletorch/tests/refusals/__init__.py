"""Every model of "What is refused" on every layout of 2 and 4 ranks: right, or refused in words."""
