/* tiles_vectors.h: products in the order of AMX's TDPBF16PS, by the vectors of an instruction set.  Included once per
 * ISA.
 *
 * A product of up to 16 pairs of bf16 elements has two chains of fma, which begin at 0.  Their sum is added to an
 * element of C:
 *
 *     first  = fma(a[k].first,  b[k].first,  first)        k = 0 .. pairs - 1
 *     second = fma(a[k].second, b[k].second, second)
 *     c = c + (first + second)
 *
 * Subnormal operands and results become zeros with the same sign.  The result is bit-identical to TDPBF16PS.  There are
 * two implementations:
 *
 *   PP_DOT_BY_FMA      x86: flush_begin sets flushing in MXCSR, flush_end restores it.  Compilers are not aware of it,
 *                      so products in between must be in functions that are not inlined
 *   PP_DOT_BY_DOUBLE   any CPU with doubles.  A product of two bf16 is exact in f64.  If its sum with an f32 is not
 *                      exact, the sum is close to one of the two and far from the middle between two f32, so rounding
 *                      twice gives the same as once.  Arm flushes results before rounding, which gives other bits */

#if defined(PP_DOT_BY_FMA)
enum { FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x0040 }; /* bits of MXCSR */

static inline unsigned flush_begin(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_RESULTS | FLUSH_OPERANDS);
    return before;
}
static inline void flush_end(unsigned before) { _mm_setcsr(before); }

typedef pp_broadcast tile_factor;
PP_INLINE tile_factor factor_at(const float *x) { return v_broadcast(x); }
PP_INLINE pp_v product_flushed(pp_v a, tile_factor b, pp_v sum) { return v_fma_broadcast(a, b, sum); }
PP_INLINE pp_v sum_flushed(pp_v a, pp_v b) { return v_add(a, b); }
#else
static inline unsigned flush_begin(void) { return 0; }
static inline void flush_end(unsigned before) { (void)before; }

/* Zero with the sign of x if x is subnormal, otherwise x. */
static inline pp_v flush_subnormal(pp_v x) {
    const pp_bits bits = (pp_bits)x, normal = (pp_bits)((bits & 0x7f800000u) != 0u);
    return (pp_v)(bits & (normal | 0x80000000u));
}

/* a * b + sum, rounded once.  A result that is subnormal after rounding becomes zero. */
static inline pp_v product_flushed(pp_v a, pp_v b, pp_v sum) {
    typedef double doubles __attribute__((vector_size(2 * sizeof(pp_v))));
    typedef uint64_t longs __attribute__((vector_size(2 * sizeof(pp_v))));
    const double lowest = 0x1p-126 - 0x1p-151;
    const doubles x = __builtin_convertvector(flush_subnormal(a), doubles);
    const doubles y = __builtin_convertvector(flush_subnormal(b), doubles);
    const doubles z = __builtin_convertvector(flush_subnormal(sum), doubles), total = x * y + z;
    const longs tiny = (longs)((total < lowest) & (total > -lowest));
    return __builtin_convertvector((doubles)((longs)total & (~tiny | 0x8000000000000000u)), pp_v);
}
typedef pp_v tile_factor;
static inline tile_factor factor_at(const float *x) { return v_set1(*x); }
static inline pp_v sum_flushed(pp_v a, pp_v b) { return product_flushed(a, v_set1(1.0f), b); }
#endif

/* 32 columns of B with up to 16 pairs each.  Columns [16 j, 16 j + 16) of pairs [8 h, 8 h + 8) begin at at[h][j];
 * consecutive pairs are `step` bytes apart.  While B is read, the bytes at distance `near` are prefetched into L1, and
 * the bytes at distance `far` into L2. */
typedef struct tile_columns {
    const unsigned char *at[2][2];
    int64_t step, near[2][2], far[2][2];
    int pairs;
} tile_columns;

enum { PP_PRODUCT_ROWS = 6, PP_PRODUCT_VECTORS = 2, PP_HALF_PAIRS = 8 };

/* Multiplies ROWS rows of A by PP_PRODUCT_VECTORS vectors of columns, beginning with vector v0.  With FIRST, `first`
 * gets the sums over the first elements of pairs; with SECOND, `second` gets those over the second ones.  Elements of A
 * are widened to f32; rows of A are `a_step` elements apart. */
PP_INLINE void chains_of(const int ROWS, const int FIRST, const int SECOND, const int v0, const float *a,
                         int64_t a_step, const tile_columns *b, pp_v *first, pp_v *second) {
    PP_UNROLL for (int i = 0; i < ROWS * PP_PRODUCT_VECTORS; i++) {
        if (FIRST) first[i] = v_set1(0.0f);
        if (SECOND) second[i] = v_set1(0.0f);
    }
    for (int half = 0; half < 2; half++) {
        const int left = b->pairs - half * PP_HALF_PAIRS, pairs = left < PP_HALF_PAIRS ? left : PP_HALF_PAIRS;
        const unsigned char *at[PP_PRODUCT_VECTORS];
        int64_t near[PP_PRODUCT_VECTORS], far[PP_PRODUCT_VECTORS];
        PP_UNROLL for (int j = 0; j < PP_PRODUCT_VECTORS; j++) {
            const int lane = (v0 + j) * PP_LANES;
            at[j] = b->at[half][lane / PP_GROUP] + lane % PP_GROUP * 4;
            near[j] = b->near[half][lane / PP_GROUP];
            far[j] = b->far[half][lane / PP_GROUP];
        }
        for (int k = 0; k < pairs; k++, a += 2) {
            pp_v x[PP_PRODUCT_VECTORS], y[PP_PRODUCT_VECTORS];
            PP_UNROLL for (int j = 0; j < PP_PRODUCT_VECTORS; j++) {
                const pp_bits words = (pp_bits)v_load((const float *)at[j]);
                x[j] = (pp_v)(words << 16);
                y[j] = (pp_v)(words & 0xffff0000u);
                if ((v0 + j) * PP_LANES % PP_GROUP == 0 && FIRST) {
                    prefetch_into_l1(at_distance(at[j], near[j]));
                    prefetch_into_l2(at_distance(at[j], far[j]), 1);
                }
                at[j] += b->step;
            }
            PP_UNROLL for (int r = 0; r < ROWS; r++) {
                if (FIRST) {
                    const tile_factor q = factor_at(a + r * a_step);
                    PP_UNROLL for (int j = 0; j < PP_PRODUCT_VECTORS; j++)
                        first[r * PP_PRODUCT_VECTORS + j] = product_flushed(x[j], q, first[r * PP_PRODUCT_VECTORS + j]);
                }
                if (SECOND) {
                    const tile_factor q = factor_at(a + r * a_step + 1);
                    PP_UNROLL for (int j = 0; j < PP_PRODUCT_VECTORS; j++)
                        second[r * PP_PRODUCT_VECTORS + j] =
                            product_flushed(y[j], q, second[r * PP_PRODUCT_VECTORS + j]);
                }
            }
        }
    }
}

PP_INLINE void product_of_rows(const int ROWS, const float *a, int64_t a_step, const tile_columns *b, float *c,
                               int64_t c_step, int fresh) {
    enum { SUMS = PP_PRODUCT_ROWS * PP_PRODUCT_VECTORS };
    for (int v0 = 0; v0 < PP_TILE / PP_LANES; v0 += PP_PRODUCT_VECTORS) {
        pp_v first[SUMS], second[SUMS];
        float *to = c + v0 * PP_LANES;
#if PP_16_REGISTERS /* one chain after the other: both need more registers than exist */
        float kept[SUMS * PP_LANES], *keep = kept;
        chains_of(ROWS, 1, 0, v0, a, a_step, b, first, NULL);
        PP_UNROLL for (int i = 0; i < ROWS * PP_PRODUCT_VECTORS; i++) v_store(keep + i * PP_LANES, first[i]);
        PP_OPAQUE(keep);
        chains_of(ROWS, 0, 1, v0, a, a_step, b, NULL, second);
        PP_UNROLL for (int i = 0; i < ROWS * PP_PRODUCT_VECTORS; i++) first[i] = v_load(keep + i * PP_LANES);
#else
        chains_of(ROWS, 1, 1, v0, a, a_step, b, first, second);
#endif
        PP_UNROLL for (int r = 0; r < ROWS; r++)
            PP_UNROLL for (int j = 0; j < PP_PRODUCT_VECTORS; j++) {
                const pp_v sum =
                    sum_flushed(first[r * PP_PRODUCT_VECTORS + j], second[r * PP_PRODUCT_VECTORS + j]);
                float *place = to + r * c_step + j * PP_LANES;
                v_store(place, sum_flushed(fresh ? v_set1(0.0f) : v_load(place), sum));
            }
    }
}

/* Adds the product of `rows` rows of A and 32 columns of B to C.  If `fresh` is set, C is overwritten.  Steps are in
 * elements. */
static __attribute__((noinline)) void add_product(int rows, const float *a, int64_t a_step, const tile_columns *b,
                                                  float *c, int64_t c_step, int fresh) {
    const int passes = (rows + PP_PRODUCT_ROWS - 1) / PP_PRODUCT_ROWS;
    for (int pass = 0; pass < passes; pass++) {
        const int from = rows * pass / passes, count = rows * (pass + 1) / passes - from;
        const float *a_from = a + from * a_step;
        float *c_from = c + from * c_step;
        switch (count) { /* at most PP_PRODUCT_ROWS */
        case 1: product_of_rows(1, a_from, a_step, b, c_from, c_step, fresh); break;
        case 2: product_of_rows(2, a_from, a_step, b, c_from, c_step, fresh); break;
        case 3: product_of_rows(3, a_from, a_step, b, c_from, c_step, fresh); break;
        case 4: product_of_rows(4, a_from, a_step, b, c_from, c_step, fresh); break;
        case 5: product_of_rows(5, a_from, a_step, b, c_from, c_step, fresh); break;
        case 6: product_of_rows(6, a_from, a_step, b, c_from, c_step, fresh); break;
        }
    }
}

/* Elements of A are bf16 numbers stored as f32. */
typedef float tile_item;

/* Nearest bf16 as f32.  Subnormal numbers become zeros. */
PP_INLINE pp_v v_rounded(pp_v x) {
    const pp_bits bits = (pp_bits)x, even = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    const pp_bits nan = (pp_bits)((bits & 0x7fffffffu) > 0x7f800000u);
    const pp_bits tiny = (pp_bits)((bits & 0x7f800000u) == 0u);
    return (pp_v)((even & ~nan & (~tiny | 0x80000000u)) | (nan & (bits | 0x400000u) & 0xffff0000u));
}

/* Splits each of 32 numbers into a sum of PARTS bf16 numbers.  The first part is the nearest bf16, each later part the
 * nearest bf16 of the remainder.  Parts are `step` elements apart. */
PP_INLINE void cut_into_parts(const int PARTS, const pp_v *x, tile_item *to, int64_t step) {
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++) {
        pp_v rest = x[j];
        PP_UNROLL for (int part = 0; part < PARTS; part++) {
            const pp_v rounded = v_rounded(rest);
            v_store(to + part * step + j * PP_LANES, rounded);
            rest = v_sub(rest, rounded);
        }
    }
}

/* Adds 32 rounded weights to 16 running sums, pair by pair, the second element of each pair first.  AVX512_BF16's dot
 * product with ones has the same order. */
PP_INLINE void add_rounded_weights(const tile_item *p, pp_v *sum) {
    float first[PP_GROUP], second[PP_GROUP];
    for (int i = 0; i < PP_GROUP; i++) {
        first[i] = p[2 * i];
        second[i] = p[2 * i + 1];
    }
    PP_UNROLL for (int j = 0; j < PP_GROUP / PP_LANES; j++)
        sum[j] = v_add(v_add(sum[j], v_load(second + j * PP_LANES)), v_load(first + j * PP_LANES));
}
