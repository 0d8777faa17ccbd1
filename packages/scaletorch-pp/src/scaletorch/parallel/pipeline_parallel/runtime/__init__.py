"""The runtime: a rank's program executed, and the messages between ranks."""
