"""Plans as data: written, found, checked against a model, explained."""
