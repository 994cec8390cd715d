/* prefetch_paced.h: requests that wait for what is computed, one tile at a time: by wide units and, of few heads, in
 * AVX2 (decode_avx2.h), where lines are asked for twice, the first time past L2.  On Intel waiting took 0.99 to 1.06
 * times as long.
 *
 * A processor runs ahead of loads that wait for memory, and asks for all that it meets there: requests come in bursts,
 * which take the few misses that the first cache can have under way, and hardware prefetchers are not given the time to
 * fetch what follows (prefetch_sides.h).  So to a place that is asked for a 0 is added, which is not known before the
 * first sum has all of the turn before.  bench/README.md ("Paced") has what that brought. */

/* In exact arithmetic.  Of 7 and 8 heads in 16 bit multiplication bounds: 1.02 to 1.05 times as long. */
PP_INLINE int is_paced(const int HEADS, const int ITEM, int mode) {
    return PP_WIDE && (ITEM == 4 || HEADS <= 6) && mode == PP_PREFETCH_PAST;
}

/* 0, as soon as x is known. */
PP_INLINE int64_t zero_after(pp_v x) {
#if PP_WIDE || PP_FEW_REGISTERS
#if PP_WIDE
    const __m128 low = _mm512_castps512_ps128(x);
#else
    const __m128 low = _mm256_castps256_ps128(x);
#endif
    int64_t lanes = _mm_cvtsi128_si64(_mm_castps_si128(low));
    __asm__("andl $0, %k0" : "+r"(lanes) : : "cc"); /* or compilers know it before */
    return lanes;
#else
    (void)x;
    return 0;
#endif
}

/* Places that are asked for while V is read: V of one group a visit later, past L2, K half a visit later, into L1, and
 * the same of the other group; the former, and how far from it the others are. */
typedef struct pp_paced {
    const unsigned char *at;
    int64_t half, other, other_half;
} pp_paced;

/* Whether V of both groups is asked for side by side while tokens [from, to) are read: where both groups are, and come
 * in whole lines; not for one head, since S3 in bf16 gained 5 % with one after the other and 2 % so, nor for 7 and 8,
 * which took 1 % more. */
PP_INLINE int is_by_both(const int HEADS, int bytes, int from, int to) {
    return HEADS > 1 && HEADS <= 6 && bytes % 128 == 0 && from < PP_GROUP && to > PP_GROUP;
}

/* What is asked for from token t of group `i` on, of V whose pairs of rows are `bytes` long and begin `run` bytes from
 * its beginning; the other group is the second. */
PP_INLINE pp_paced paced_values(const pp_tile *tile, int both, int64_t run, int bytes, int i, int t) {
    const unsigned char *const *v = tile->next_v[0] ? tile->next_v : tile->v;
    const int group = both ? 0 : i;
    const int64_t offset = run + (both ? (i * PP_GROUP + t) / 2 * (bytes / 2) : t / 2 * bytes);
    return (pp_paced){.at = v[group] + offset,
                      .half = apart(tile->next_k[group], v[group]),
                      .other = apart(v[1], v[group]),
                      .other_half = apart(tile->next_k[1], v[group])};
}

/* Asks for the next `bytes` of one group or of both when x is known. */
PP_INLINE void prefetch_paced(pp_paced *paced, int both, int bytes, pp_v x) {
    const unsigned char *at = distant(paced->at, zero_after(x));
    prefetch_past_l2(at, bytes);
    if (both) prefetch_past_l2(distant(at, paced->other), bytes);
    prefetch_into_l1(distant(at, paced->half), bytes);
    if (both) prefetch_into_l1(distant(at, paced->other_half), bytes);
    paced->at = at + bytes;
}
