"""Continuous batching in plain Python."""
