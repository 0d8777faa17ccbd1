"""What is saved, as this rank has it, and its place in the whole."""
