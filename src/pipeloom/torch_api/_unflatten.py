"""In torch, part of its tracing frontend. Models are cut in :mod:`pipeloom.model` here."""
