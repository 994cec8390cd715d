"""Memory and attention in readable pure Python: specification, test oracle and baseline. Never imported by the core."""
