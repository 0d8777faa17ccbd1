"""The runtime: it executes a rank's program, and exchanges messages between ranks."""
