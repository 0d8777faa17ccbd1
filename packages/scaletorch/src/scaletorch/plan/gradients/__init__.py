"""A rank's gradients while a step makes and sums them: which come when, and what holds them."""
