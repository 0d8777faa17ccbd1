"""What a GPU shows: tests, proof, faults and figures, each group in a process of its own."""
