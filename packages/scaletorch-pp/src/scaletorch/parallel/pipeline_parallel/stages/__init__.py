"""A rank's stages: the model cut, its hidden states, ties and weights."""
