"""What sees what, cut into blocks that kernels are fast at, and pictures of it."""
