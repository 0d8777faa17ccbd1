"""What is done with summed gradients before a step: norm, clipping, loss scaling."""
