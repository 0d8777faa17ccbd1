"""Random mutants of the sources, and which of proof and tests notices each."""
