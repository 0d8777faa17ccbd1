"""Tensors that the ranks of one host read and write in one another's memory."""
