"""Bridges to other libraries: each module imports its own when it is used, and none is needed by the rest."""
