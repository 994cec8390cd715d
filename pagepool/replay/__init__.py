"""Recorded traffic through the scheduler and the pool, under a virtual clock.

driver   the loop: steps and time      plain     its blocks in plain Python
attend   K/V and decode on real memory
clock    costs and arrivals            latency   times to and between tokens
ptrace   reads a trace
prompts  a trace as block ids, tokens
passes   prompts through the cache     cluster   many engines, by a route
report   results as numbers
picture  what is drawn, as data, and the HTML page
"""
