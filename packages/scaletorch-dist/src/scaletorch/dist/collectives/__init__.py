"""The collectives on tensors, kind by kind; `scaletorch.dist.dist` names them all."""
