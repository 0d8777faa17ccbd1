"""Tokens to the ranks of their experts, and results back."""
