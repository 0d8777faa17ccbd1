"""The exchange of tokens and results between ranks."""
