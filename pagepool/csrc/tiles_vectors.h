/* tiles_vectors.h: products of tiles by the vectors of an instruction set, with the bits of AMX's TDPBF16PS: for CPUs
 * without AMX.  Included once per ISA, inside its target region and after its vector functions, as pp_tiles_<PP_ISA>.
 * It is written to be short: "exact" is faster on such CPUs.
 *
 * A product of up to 16 pairs of bf16 elements has two chains of fma, which begin at 0.  Their sum is added to an
 * element of C:
 *
 *     first  = fma(a[k].first,  b[k].first,  first)        k = 0 .. pairs - 1
 *     second = fma(a[k].second, b[k].second, second)
 *     c = c + (first + second)
 *
 * Subnormal operands and results become zeros with the same sign.  There are two implementations:
 *
 *   PP_DOT_BY_FMA      x86: flush_begin sets flushing in MXCSR, flush_end restores it.  Compilers are not aware of it,
 *                      so products in between must be in functions that are not inlined
 *   PP_DOT_BY_DOUBLE   any CPU with doubles.  A product of two bf16 is exact in f64.  If its sum with an f32 is not
 *                      exact, the sum is close to one of the two and far from the middle between two f32, so rounding
 *                      twice gives the same as once.  Arm flushes results before rounding, which gives other bits */
#include "convert_rows.h"
#include "softmax_math.h"
#include "unit_rows.h"

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

enum { PRODUCT_ROWS = 4, PRODUCT_VECTORS = 2 };

/* 32 columns of B with up to 16 pairs each: pair k of columns [16 j, 16 j + 16) is at at[j] + k * step. */
typedef struct tile_columns {
    const unsigned char *at[2];
    int64_t step;
    int pairs;
} tile_columns;

/* One chain of PRODUCT_ROWS rows of A and PRODUCT_VECTORS vectors of columns, beginning with vector v0: over the first
 * or, if ODD, over the second elements of pairs. */
PP_INLINE void chain_of(const int ODD, const int v0, const float *a, const tile_columns *b, pp_v *sum) {
    PP_UNROLL for (int i = 0; i < PRODUCT_ROWS * PRODUCT_VECTORS; i++) sum[i] = v_set1(0.0f);
    for (int k = 0; k < b->pairs; k++) {
        pp_v x[PRODUCT_VECTORS];
        PP_UNROLL for (int j = 0; j < PRODUCT_VECTORS; j++) {
            const int lane = (v0 + j) * PP_LANES;
            const unsigned char *at = b->at[lane / PP_GROUP] + k * b->step + lane % PP_GROUP * 4;
            const pp_bits words = (pp_bits)v_load((const float *)(const void *)at);
            x[j] = (pp_v)(ODD ? words & 0xffff0000u : words << 16);
        }
        PP_UNROLL for (int r = 0; r < PRODUCT_ROWS; r++) {
            const tile_factor q = factor_at(a + 32 * r + 2 * k + ODD);
            PP_UNROLL for (int j = 0; j < PRODUCT_VECTORS; j++)
                sum[r * PRODUCT_VECTORS + j] = product_flushed(x[j], q, sum[r * PRODUCT_VECTORS + j]);
        }
    }
}

/* Adds the product of rows [from, to) of A, which are 32 elements wide, and 32 columns of B to C.  If `fresh` is set, C
 * is overwritten.  A and C have 32 rows: some more rows are computed, whose results are not used. */
static __attribute__((noinline)) void add_product(int from, int to, const float *a, const tile_columns *b, float *c,
                                                  int64_t c_step, int fresh) {
    for (int row = from / PRODUCT_ROWS * PRODUCT_ROWS; row < to; row += PRODUCT_ROWS)
        for (int v0 = 0; v0 < PP_TILE / PP_LANES; v0 += PRODUCT_VECTORS) {
            pp_v first[PRODUCT_ROWS * PRODUCT_VECTORS], second[PRODUCT_ROWS * PRODUCT_VECTORS];
            chain_of(0, v0, a + 32 * row, b, first);
            chain_of(1, v0, a + 32 * row, b, second);
            for (int r = 0; r < PRODUCT_ROWS; r++)
                for (int j = 0; j < PRODUCT_VECTORS && row + r >= from && row + r < to; j++) {
                    float *place = c + (row + r) * c_step + (v0 + j) * PP_LANES;
                    const pp_v sum = sum_flushed(first[r * PRODUCT_VECTORS + j], second[r * PRODUCT_VECTORS + j]);
                    v_store(place, sum_flushed(fresh ? v_set1(0.0f) : v_load(place), sum));
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

#define IN_FLIGHT 1
#include "tiles_panel.h"

static void lay_out_vectors(const pp_kv_layout *layout, int q_parts, panel_sizes *sizes) {
    lay_out_tiles(layout, q_parts, sizes);
    sizes->own = PP_TILE * PP_TILE * 2; /* a copy of V of a tile: [16 pairs][32 dims] */
}

static void read_vectors(const panel_run *run, const pp_chunk *chunk, int32_t head, panel_chunk *to) {
    list_groups(run, chunk, head, to);
}

/* Scores of all tiles. */
static void scores_vectors(const pp_panel *panel) {
    const panel_call *call = panel->call;
    const unsigned before = flush_begin();
    for (int t = panel->first; t < panel->end; t++) {
        int fresh = 1;
        for (int i = 0; i < call->steps; i++)
            for (int other = call->page_parts - 1; other >= 0; other--) { /* smallest part first */
                const int64_t at = other * call->k_step + i * PP_K_TILE;
                const int pairs = (call->head_dim - 32 * i) / 2;
                const tile_columns b = {.at = {panel->chunk->k[2 * t] + at, panel->chunk->k[2 * t + 1] + at},
                                        .step = 64,
                                        .pairs = pairs < 16 ? pairs : 16};
                for (int part = call->q_parts - 1; part >= 0; part--, fresh = 0)
                    add_product(0, panel->rows, queries_at(call, panel->q, part, i), &b, panel->to->s + t * PP_TILE,
                                PP_SCORE_STEP, fresh);
            }
    }
    flush_end(before);
}

/* Returns 1 if V of a tile has a NaN or an infinity.  Only the first part of each value is tested: it is not finite if
 * the value is not. */
static int tile_not_finite(const panel_call *call, const unsigned char *const *v) {
    uint32_t found = 0;
    for (int g = 0; g < 2; g++)
        for (int64_t i = 0; i < call->v_step; i += 4) {
            uint32_t word;
            memcpy(&word, v[g] + i, sizeof word);
            found |= ((word & 0x7f80u) == 0x7f80u) | ((word & 0x7f800000u) == 0x7f800000u);
        }
    return found != 0;
}

/* Adds the weights of rows [from, to) times 32 dims of V of a tile, of which these rows see `seen`, to their sums. */
static void add_values(const panel_run *run, const pp_panel *panel, int from, int to, int t, int d, uint32_t seen) {
    const panel_call *call = panel->call;
    unsigned char *copy = run->scratch.own;
    const tile_columns b = {.at = {copy, copy + 64}, .step = 128, .pairs = 16};
    int fresh = t == panel->first;
    for (int other = call->page_parts - 1; other >= 0; other--) {
        copy_v(call->v_head_dim, d, panel->chunk->v + 2 * t, other * call->v_step, seen, copy, 128, 64);
        for (int part = call->p_parts - 1; part >= 0; part--, fresh = 0)
            add_product(from, to, panel->to->p[part][t], &b, panel->sums + 32 * d, call->sums_step, fresh);
    }
}

/* Weights times V of all tiles. */
static void values_vectors(const panel_run *run, const pp_panel *panel) {
    const unsigned before = flush_begin();
    for (int t = panel->first; t < panel->end; t++) {
        /* A weight of 0 masks V only if V is finite.  Otherwise masked tokens are zeroed for each run of rows. */
        const int apart = !panel->whole[t] && tile_not_finite(panel->call, panel->chunk->v + 2 * t);
        for (int d = 0; d < panel->call->v_squares; d++)
            for (int from = 0, to; from < panel->rows; from = to) {
                for (to = apart ? from + 1 : panel->rows;
                     to < panel->rows && panel->seen[t][to] == panel->seen[t][from];)
                    to++;
                add_values(run, panel, from, to, t, d, apart ? panel->seen[t][from] : ALL_SEEN);
            }
    }
    flush_end(before);
}

static const panel_ways ways_vectors = {.lay_out = lay_out_vectors,
                                        .pack = pack_tiles,
                                        .read = read_vectors,
                                        .scores = scores_vectors,
                                        .softmax = softmax_of_panel,
                                        .values = values_vectors};

static void decode_vectors(const pp_chunk *work) { run_decode(work, &ways_vectors); }
static void prefill_vectors(const pp_query_block *work) { run_prefill(work, &ways_vectors); }
static void shared_vectors(const pp_shared *work) { run_shared(work, &ways_vectors); }
static int64_t bytes_vectors(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows) {
    return panel_bytes(&ways_vectors, layout, pp_query_parts(arithmetic, q_dtype), rows);
}

const pp_way PP_CAT(pp_tiles_, PP_ISA, ) = {decode_vectors, prefill_vectors,   shared_vectors, bytes_vectors,
                                            PP_PANEL_ROWS,  8 * PP_PANEL_ROWS, PRODUCT_ROWS,   30};
