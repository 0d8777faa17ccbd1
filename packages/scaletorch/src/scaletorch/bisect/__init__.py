"""Where a fault was born: the first tensor that differs between two runs, named."""
