"""Proves that a schedule is right, or says everything that is wrong with it."""
