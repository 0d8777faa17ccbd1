"""Random mutants of the sources, and the proof or test that notices each."""
