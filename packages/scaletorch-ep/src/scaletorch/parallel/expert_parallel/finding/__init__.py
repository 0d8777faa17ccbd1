"""What of a model is experts: plans, how many there are, and how they are called."""
