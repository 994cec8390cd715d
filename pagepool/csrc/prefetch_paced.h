/* prefetch_paced.h: requests that wait for what is computed, by wide units where lines are asked for again.
 *
 * A processor runs ahead of loads that wait for memory, and asks for all that it meets there: requests come in bursts,
 * which take the few misses that the first cache can have under way, and hardware prefetchers are not given the time
 * to fetch what follows (prefetch_sides.h).  So a place that is asked for is the sum of itself and of a 0 that is not
 * known before the sums of a head are what they were a turn ago.  Reading from memory on Zen 5, with one thread, and V
 * of both groups asked for side by side: 3 and 4 heads of 128 dims in 16 bit took 0.93 to 0.96 of the time, 2 to 5
 * heads of 64 dims in f32 0.89 to 0.93; with two threads 0.95 to 1.03 and 0.93 to 0.97. */

PP_INLINE int is_paced(int mode) { return PP_WIDE && mode == PP_PREFETCH_REPEAT; }

/* 0, as soon as x is known. */
PP_INLINE int64_t zero_after(pp_v x) {
#if PP_WIDE
    int64_t lanes = _mm_cvtsi128_si64(_mm_castps_si128(_mm512_castps512_ps128(x)));
    __asm__("andl $0, %k0" : "+r"(lanes) : : "cc"); /* or compilers know it before */
    return lanes;
#else
    (void)x;
    return 0;
#endif
}

/* Of V of a group what is asked for a visit before it is read, past L2, and of the next K what is so half a visit
 * before, into L1; both, if that is wanted, of the other group as well. */
typedef struct pp_paced {
    const unsigned char *at; /* from there to */
    int64_t half, other, other_half;
} pp_paced;

/* What follows `offset` bytes from the beginning of V of a group, and of the second one. */
PP_INLINE pp_paced paced_from(const pp_tile *tile, int group, int64_t offset) {
    const unsigned char *const *v = tile->next_v[0] ? tile->next_v : tile->v;
    return (pp_paced){.at = v[group] + offset,
                      .half = apart(tile->next_k[group], v[group]),
                      .other = apart(v[1], v[group]),
                      .other_half = apart(tile->next_k[1], v[group])};
}

/* Asks for the next `bytes` of one or both groups when x is known. */
PP_INLINE void prefetch_paced(pp_paced *paced, const int BOTH, int bytes, pp_v x) {
    const unsigned char *at = distant(paced->at, zero_after(x));
    prefetch_past_l2(at, bytes);
    if (BOTH) prefetch_past_l2(distant(at, paced->other), bytes);
    prefetch_into_l1(distant(at, paced->half), bytes);
    if (BOTH) prefetch_into_l1(distant(at, paced->other_half), bytes);
    paced->at = at + bytes;
}
