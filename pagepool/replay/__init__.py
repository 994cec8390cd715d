"""Recorded traffic through the scheduler and the pool, under a virtual clock.

driver   the loop: steps and time      plain     its blocks in plain Python
attend   K/V and decode on real memory
clock    costs and arrivals            latency   times to and between tokens
ptrace   reads a trace
prompts  a trace as block ids, tokens  order     in which order prompts come without a clock
passes   prompts through the cache     lru_sweep LRU at every capacity at once
cluster  many engines, by a route   cluster_report its results
report   results as numbers
picture  what is drawn, as data, and the HTML page
"""
