"""Buffers in which gradients live, and the hooks that reduce them as backward fills them."""
