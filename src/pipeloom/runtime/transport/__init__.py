"""How messages travel between ranks: one small protocol and its implementations."""
