"""A model's own experts on the rows that came."""
