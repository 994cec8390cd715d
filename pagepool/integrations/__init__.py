"""Integrations with other libraries. Each module imports its library on use; the rest of pagepool needs none."""
