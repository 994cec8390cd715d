"""`pagepool replay`: recorded traffic through the scheduler and the pool, under a virtual clock.

ptrace    reads a trace                      driver    the loop: arrivals, steps, time
clock     what a step costs                  meter     counts and times the block operations
latency   times to and between tokens        attend    K/V and decode on real memory, in the shape of a geometry
options   the arguments                      report, progress    what is shown
command   from arguments to results

prompts   a trace as rows of block ids       order        in which order they come without a clock
prefix_pass    rows through the cache        lru_sweep    LRU at every capacity at once
"""
