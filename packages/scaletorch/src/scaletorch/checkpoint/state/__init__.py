"""The state to save: this rank's tensors, and their places in the whole tensors."""
