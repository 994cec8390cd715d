/* quantised_pages.h: converts K and V of a group of a quantised page to an order that the kernels read.  Included once
 * per ISA. */

/* Unpacks the lower and the upper 4 bits of 64 (or 16) bytes, and adds `add` to each. */
PP_INLINE void unpack_64(unsigned char *to, int64_t upper, const unsigned char *from, uint8_t add) {
    typedef uint8_t bytes __attribute__((vector_size(64)));
    bytes x, low, high;
    memcpy(&x, from, sizeof x);
    low = (x & 15) + add;
    high = (x >> 4) + add;
    memcpy(to, &low, sizeof low);
    memcpy(to + upper, &high, sizeof high);
}
PP_INLINE void unpack_16(unsigned char *to, int64_t upper, const unsigned char *from, uint8_t add) {
    typedef uint8_t bytes __attribute__((vector_size(16)));
    bytes x, low, high;
    memcpy(&x, from, sizeof x);
    low = (x & 15) + add;
    high = (x >> 4) + add;
    memcpy(to, &low, sizeof low);
    memcpy(to + upper, &high, sizeof high);
}

/* Converts int4 of a group of one head to the order of int8, including the scales. */
static __attribute__((noinline)) void unpack_int4(int is_v, int32_t dims, const unsigned char *from,
                                                  unsigned char *to) {
    const uint8_t add = is_v ? (uint8_t)-8 : 120;
    memcpy(to + pp_scales_at(PP_INT8, dims), from + pp_scales_at(PP_INT4, dims), PP_GROUP * sizeof(float));
    for (int32_t d = 0, width; d < dims; d += width) {
        width = is_v ? pp_run_width(dims, d) : 8;
        /* Rows of `bytes` bytes, lower halves first.  A row of K has 4 dims; a row of V has half of the run for 4
         * tokens. */
        const int bytes = is_v ? width * 2 : PP_GROUP * 4;
        for (int row = 0; row < width * PP_GROUP / 2; row += bytes, to += bytes)
            for (int i = 0, step; i < bytes; i += step, from += step, to += step) {
                step = bytes % 64 ? 16 : 64;
                if (step == 64)
                    unpack_64(to, bytes, from, add);
                else
                    unpack_16(to, bytes, from, add);
            }
    }
}

/* Returns a head's K or V of a group in the order that the kernels read: `from` itself, or a copy in `scratch`. */
static const unsigned char *bring_in(int32_t dtype, int is_v, int32_t dims, const unsigned char *from,
                                     unsigned char *scratch) {
    if (dtype != PP_INT4) return from;
    unpack_int4(is_v, dims, from, scratch);
    return scratch;
}
