"""A step as ranks write it down, and what each says that it has of the whole."""
