"""Cutting a model into stages."""
