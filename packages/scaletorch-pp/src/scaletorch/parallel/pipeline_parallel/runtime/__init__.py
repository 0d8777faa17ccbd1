"""Executes a program: what actions give each other, as messages between ranks."""
