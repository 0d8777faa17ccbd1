"""Summed gradients before a step: their norm, clipping, loss scaling."""
