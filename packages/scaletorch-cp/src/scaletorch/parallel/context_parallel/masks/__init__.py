"""Attention masks, divided into blocks for which there are fast kernels."""
