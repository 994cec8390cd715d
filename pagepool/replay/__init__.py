"""`pagepool replay`: recorded traffic through the scheduler and the pool, under a virtual clock.

ptrace    reads a trace                      driver    the loop: arrivals, steps, time
clock     what a step costs                  meter     counts and times the block operations
latency   times to and between tokens        attend    K/V and decode on real memory, in the shape of a geometry
command   options to a replay                report, progress    what is shown
"""
