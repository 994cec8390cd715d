"""`pagepool replay` and `pagepool record`: recorded traffic through the scheduler and the pool, under a virtual clock.

options   the arguments                      command   from arguments to results; passes: the same without a clock
ptrace    reads a trace, by json_lines       convert   writes one from token ids

driver    the loop: steps and time           arrivals  when requests come
timeline  a replay in some windows           meter     counts and times the block operations
clock     what a step costs                  attend    K/V and decode on real memory, in the shape of a geometry
latency   times to and between tokens        report, progress    what is shown

prompts   a trace as rows of block ids       order        in which order they come without a clock
prefix_pass    rows through the cache        lru_sweep    LRU at every capacity at once
hybrid_pass    states beside the cache       prefix_report, hybrid_report    what is shown

picture   what is drawn, as data: plot makes a PNG of it, page one HTML file
"""
