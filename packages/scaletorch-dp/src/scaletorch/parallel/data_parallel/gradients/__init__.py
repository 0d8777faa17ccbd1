"""Operations on summed gradients before a step: norm, clipping, loss scaling."""
