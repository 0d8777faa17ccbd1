"""Experts in bare lists, whose blocks are run to ask for rows and again with the results."""
