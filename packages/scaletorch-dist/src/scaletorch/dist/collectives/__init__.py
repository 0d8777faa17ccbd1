"""Collectives on tensors, one module per kind; `scaletorch.dist.dist` exports them all."""
