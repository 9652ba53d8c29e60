"""Passes: verbs that take a Schedule and return a valid Schedule, one a file."""
