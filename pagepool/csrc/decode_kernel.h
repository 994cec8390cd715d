/* decode_kernel.h: one chunk of decode attention for one dtype, in an instruction set's vocabulary.
 *
 * Included once per dtype with PP_DTYPE (f32, f16, bf16), PP_ITEM (bytes of an element), PP_COLUMN (bytes between
 * neighbours of a row, where pairs of rows may be interleaved) and the words of decode_repack.h defined, and once more
 * for bf16 pages with PP_DOT, which takes the work on a tile from decode_dot.h.  The walk, per tile of 32 tokens (two
 * groups of 16, in two pages or one) and per kv head, with up to PP_MAX_HEADS query heads at a time:
 *
 *   scores   32 tokens side by side, dims one after another; each K load serves all heads
 *   softmax  running shift, rescale, powers of 2
 *   values   64 dims side by side, tokens one after another; each V load serves all heads
 *
 * While a head is worked on, the next head's bytes are prefetched (after the last head, the next tile's first).
 *
 * The order of every sum is fixed by absolute token positions and nothing else; pagepool/reference/canonical.py spells
 * it out.  Which heads share a load, and how many vectors are in flight, changes no bit. */

#define PP_NAME(name) PP_CAT(name, _, PP_DTYPE)
#define PP_OF_PAGES(name) PP_CAT(name, _, PP_PAGES)

#ifdef PP_DOT
#define PP_BY_HEADS 0
#include "decode_dot.h"
#else
#define PP_BY_HEADS PP_FEW_REGISTERS /* the work on a head is decode_avx2.h's */
#define PP_PAGES PP_DTYPE
#define PP_QUERY_PAIR 2 /* elements of packed queries that a pair of dims takes */
#define LOAD2 PP_CAT(v_load2_, PP_DTYPE, )
#define LOAD2_HALF PP_CAT(v_load2_half_, PP_DTYPE, )
#define WEIGH weigh
#define ADD_TO_BLOCKS add_to_blocks
#define SCORE_VECTORS score_vectors

enum { PP_NAME(K_PAIR_BYTES) = 2 * PP_GROUP * PP_ITEM, PP_NAME(RUN_BYTES) = PP_GROUP * PP_V_RUN * PP_ITEM };

#if PP_FEW_REGISTERS
#define EVEN_ROW PP_CAT(v_even_, PP_DTYPE, )
#define ODD_ROW PP_CAT(v_odd_, PP_DTYPE, )
#include "decode_avx2.h"
#else
/* Of a pair of rows of K, which both chains of scores read, what a chain that goes alone asks for: in f32 its own row,
 * in 16 bit, where both are one line, each chain the lines of every second pair. */
PP_INLINE int PP_NAME(chain_asks)(const int EVEN, const int ODD, int pair) {
    return (EVEN && ODD) || PP_ITEM == 4 || pair % 2 == ODD;
}
PP_INLINE int PP_NAME(chain_bytes)(const int EVEN, const int ODD) {
    return EVEN && ODD ? PP_NAME(K_PAIR_BYTES) : 64;
}
PP_INLINE int PP_NAME(chain_skips)(const int EVEN) { return !EVEN && PP_ITEM == 4 ? 64 : 0; }

/* Scores of NV vectors of tokens, from vector `first` of the tile, for HEADS heads: two chains of fma, over EVEN and
 * over ODD dims, the latter after the former or both at once.  From one pair of dims to the next, queries are q_step
 * elements apart. */
PP_INLINE void PP_NAME(chains)(const int HEADS, const int NV, const int EVEN, const int ODD, const pp_tile *tile,
                               int first, const float *q, const int q_step, float *s, int prefetch) {
    enum { NEAR = PP_WIDE ? (int)PP_NAME(RUN_BYTES) : (int)PP_NEAR };
    const int skip = PP_NAME(chain_skips)(EVEN);
    const int per_group = PP_GROUP / PP_LANES;
    const int pairs = tile->head_dim / 2;
    const unsigned char *rows[4], *ahead[4], *half[4];
    int column[4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        rows[j] = tile->k[(first + j) / per_group];
        ahead[j] = tile->next_k[(first + j) / per_group];
        half[j] = tile->v[(first + j) / per_group];
        column[j] = (first + j) % per_group * PP_LANES;
    }
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    for (int p = 0; p < pairs; p++, q += q_step) {
        pp_v a[4], b[4];
        const int64_t at = (int64_t)p * PP_NAME(K_PAIR_BYTES);
        const int64_t later = is_paced(HEADS, PP_ITEM, prefetch) ? zero_after(EVEN ? even[0] : odd[0]) : 0;
        const int64_t asked = at + skip + later;
        PP_UNROLL for (int j = 0; j < NV; j++) {
            LOAD2(rows[j] + at, PP_GROUP, column[j], &a[j], &b[j]);
            if (prefetch && column[j] == 0 && PP_NAME(chain_asks)(EVEN, ODD, p)) {
                if (PP_WIDE && PP_ITEM == 4 && prefetch == PP_PREFETCH_RUN)
                    prefetch_into_l1(rows[j] + asked + PP_NEAR, PP_NAME(chain_bytes)(EVEN, ODD));
                prefetch_walk(prefetch, PP_ITEM == 4, PP_NAME(chain_bytes)(EVEN, ODD), ahead[j] + asked,
                              half[j] + asked, rows[j] + asked + NEAR, rows[j] + asked + PP_NEARER);
            }
        }
        PP_UNROLL for (int g = 0; g < HEADS; g++) {
            const pp_spread x = v_spread(q + 2 * g + !EVEN), y = EVEN && ODD ? v_spread(q + 2 * g + 1) : x;
            PP_UNROLL for (int j = 0; j < NV; j++) {
                if (EVEN) even[g * NV + j] = v_fma_spread(a[j], x, even[g * NV + j]);
                if (ODD) odd[g * NV + j] = v_fma_spread(b[j], y, odd[g * NV + j]);
            }
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            store_chains(EVEN, ODD, s + g * PP_TILE + (first + j) * PP_LANES, even[g * NV + j], odd[g * NV + j]);
}

/* The same by both chains: at once, if there are registers for them. */
PP_INLINE void PP_NAME(scores)(const int HEADS, const int NV, const pp_tile *tile, int first, const float *q,
                               const int q_step, float *s, int prefetch) {
    const int APART = chains_apart(HEADS);
    PP_NAME(chains)(HEADS, NV, 1, !APART, tile, first, q, q_step, s, prefetch);
    if (APART) PP_NAME(chains)(HEADS, NV, 0, 1, tile, first, q, q_step, s, prefetch);
}

/* Adds p V of one or both of two neighbouring tokens: FIRST, SECOND say which are seen. */
PP_INLINE void PP_NAME(value_pair)(const int HEADS, const int NV, const int HALF, const int FIRST, const int SECOND,
                                   const unsigned char *rows, const int width, int column, const float *weight,
                                   pp_v *sum) {
    pp_v a[8], b[8];
    PP_UNROLL for (int j = 0; j < NV; j++) {
#if PP_HALF_TAIL
        if (HALF)
            LOAD2_HALF(rows, width, column, &a[j], &b[j]);
        else
#endif
            LOAD2(rows, width, column + j * PP_LANES, &a[j], &b[j]);
    }
    (void)HALF;
    if (FIRST)
        PP_UNROLL for (int g = 0; g < HEADS; g++) {
            const pp_spread w = v_spread(weight + g * PP_TILE);
            PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_fma_spread(a[j], w, sum[g * NV + j]);
        }
    if (SECOND)
        PP_UNROLL for (int g = 0; g < HEADS; g++) {
            const pp_spread w = v_spread(weight + g * PP_TILE + 1);
            PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_fma_spread(b[j], w, sum[g * NV + j]);
        }
}

/* Adds p V of tokens [from, to) to NV vectors of dims, from `column` of V's dims on, which lies in a run that is
 * `width` dims wide. */
PP_INLINE void PP_NAME(values)(const int HEADS, const int NV, const int HALF, const pp_tile *tile, const int width,
                               int column, int from, int to, const float *p, const float *rescale, float *o,
                               int prefetch) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * PP_ITEM;
    pp_v sum[PP_MAX_HEADS * 8];
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) {
            sum[g * NV + j] = v_load(o + g * tile->row_stride + column + j * PP_LANES);
            if (rescale) sum[g * NV + j] = v_mul(sum[g * NV + j], v_set1(rescale[g]));
        }
    const int pair_bytes = 2 * width * PP_ITEM;
    const int64_t v_bytes = (int64_t)tile->v_head_dim * PP_GROUP * PP_ITEM;
    const int both = is_by_both(HEADS, pair_bytes, from, to);
    for (int i = 0; i * PP_GROUP < to; i++) {
        const int left = to - i * PP_GROUP, tokens = left < PP_GROUP ? left : PP_GROUP;
        const int before = from - i * PP_GROUP, first = before > 0 ? before : 0;
        if (first >= tokens) continue;
        int t = first & ~1;
        const int64_t at = run + t / 2 * pair_bytes, next_run = run + (int64_t)PP_GROUP * width * PP_ITEM;
        const unsigned char *rows = tile->v[i] + at, *end = tile->v[i] + v_bytes;
        const unsigned char *ahead = (prefetch ? tile->next_v[i] : tile->v[i]) + at, *half = tile->next_k[i] + at;
        const unsigned char *near = next_run < v_bytes ? rows + (next_run - run) : tile->next_k[i] + (at - run);
        const float *weight = p + i * PP_GROUP + t;
        if (first & 1) { /* the second row alone is seen */
            PP_NAME(value_pair)(HEADS, NV, HALF, 0, 1, rows, width, column % PP_V_RUN, weight, sum);
            t += 2, weight += 2, rows += pair_bytes, ahead += pair_bytes, half += pair_bytes, near += pair_bytes;
        }
        pp_paced paced = paced_values(tile, both, run, pair_bytes, i, t);
        for (; t + 1 < tokens; t += 2, weight += 2, rows += pair_bytes) {
            if (PP_WIDE && PP_ITEM == 4 && prefetch == PP_PREFETCH_RUN) {
                /* Of f32 the next run of both groups, side by side, and again soon before it is read, as K is above: S1
                 * took 0.93 to 0.96, S3 0.94 to 0.95 of the time of one group after the other and of asking once.  The
                 * second time is not prefetch_walk's: from there S1 took 1.06 times as long in cache. */
                PP_UNROLL for (int group = 0; group < 2; group++) {
                    const unsigned char *asked = next_run < v_bytes ? tile->v[group] + next_run : tile->next_k[group];
                    prefetch_past_l2(asked + (i * PP_GROUP + t) / 2 * (pair_bytes / 2), pair_bytes / 2);
                }
                prefetch_into_l1(rows + PP_NEAR, pair_bytes);
            } else if (is_paced(HEADS, PP_ITEM, prefetch)) {
                prefetch_paced(&paced, both, both ? pair_bytes / 2 : pair_bytes, sum[0]);
            } else if (prefetch) {
                prefetch_walk(prefetch, PP_ITEM == 4, pair_bytes, ahead, half, near,
                              rows + (rows + PP_NEARER < end ? PP_NEARER : 0));
                ahead += pair_bytes, half += pair_bytes, near += pair_bytes;
            }
            PP_NAME(value_pair)(HEADS, NV, HALF, 1, 1, rows, width, column % PP_V_RUN, weight, sum);
        }
        if (t < tokens) /* the second row is not the sequence's */
            PP_NAME(value_pair)(HEADS, NV, HALF, 1, 0, rows, width, column % PP_V_RUN, weight, sum);
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}

/* What is left over: one vector of tokens at the ragged end of a sequence, the last 8 dims of rows that are no multiple
 * of a vector.  Head by head, since it is little and every copy of the code is not. */
static __attribute__((noinline)) void PP_NAME(scores_left)(int heads, const pp_tile *tile, int first, const float *q,
                                                           int q_step, float *s, int prefetch) {
    PP_FORGET(heads); /* or compilers make a copy for each number */
    for (int g = 0; g < heads; g++)
        PP_NAME(scores)(1, 1, tile, first, q + 2 * g, q_step, s + g * PP_TILE, g ? 0 : prefetch);
}

#if PP_HALF_TAIL
static __attribute__((noinline)) void PP_NAME(values_left)(int heads, const pp_tile *tile, int width, int column,
                                                           int from, int to, const float *p, const float *rescale,
                                                           float *rows, int prefetch) {
    PP_FORGET(heads);
    for (int g = 0; g < heads; g++)
        PP_NAME(values)(1, 1, 1, tile, width, column, from, to, p + g * PP_TILE, rescale ? rescale + g : NULL,
                        rows + g * tile->row_stride, g ? 0 : prefetch);
}
#endif

/* One tile of one kv head for HEADS of its rows (a row: a query token's head) that see the same of it.  Their queries
 * begin at q, from one pair of dims to the next q_step elements apart, their sums at `rows` and their shifts at m. */
PP_INLINE void PP_NAME(tile)(const int HEADS, const pp_tile *tile, const float *q, int q_step, float *rows, float *m,
                             int prefetch) {
    float s[PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[PP_RESCALES];
    enum { VECTORS = PP_TILE / PP_LANES };
    const int full = tile->seen >> PP_GROUP ? VECTORS : VECTORS / 2;
    int vector = tile->seen << PP_GROUP ? 0 : VECTORS / 2;
    const int pass = score_heads(HEADS), last = HEADS - pass; /* two passes at most */
    for (; vector + score_vectors(HEADS) <= full; vector += score_vectors(HEADS)) {
        PP_NAME(scores)(pass, score_vectors(HEADS), tile, vector, q, q_step, s, prefetch);
        if (last)
            PP_NAME(scores)(last, score_vectors(HEADS), tile, vector, q + 2 * pass, q_step, s + pass * PP_TILE, 0);
    }
    for (; vector < full; vector++) PP_NAME(scores_left)(HEADS, tile, vector, q, q_step, s, prefetch);
    bend_scores(tile, 0, HEADS, s);
    if (tile->seen != ALL_SEEN) hide_scores(tile, HEADS, s);
    const float *scales = make_weights(HEADS, s, m, rows, tile->row_stride, rescale) ? rescale : NULL;
    if (tile->block_sums) add_to_blocks(tile, HEADS, s, scales);
    if (!tile->next_v[0]) prefetch = PP_PREFETCH_NONE;
    uint32_t seen = tile->seen; /* run by run: what a row does not see must not be multiplied with, it may be NaN */
    do {
        int from, to;
        seen = take_run(seen, &from, &to);
        const int columns = value_vectors(HEADS) * PP_LANES, dims = tile->v_head_dim;
        const int whole = dims / PP_V_RUN * PP_V_RUN;
        int d = 0;
        for (; d < whole; d += columns)
            PP_NAME(values)(HEADS, value_vectors(HEADS), 0, tile, PP_V_RUN, d, from, to, s, scales, rows,
                            d % PP_V_RUN ? 0 : prefetch);
        for (; d + PP_LANES <= dims; d += PP_LANES)
            PP_NAME(values)(HEADS, 1, 0, tile, dims - whole, d, from, to, s, scales, rows, d == whole ? prefetch : 0);
#if PP_HALF_TAIL
        if (d < dims)
            PP_NAME(values_left)(HEADS, tile, dims - whole, d, from, to, s, scales, rows, d == whole ? prefetch : 0);
#endif
        scales = NULL;
        prefetch = PP_PREFETCH_NONE;
    } while (seen);
}
#if PP_STEPS
#include "decode_whole.h"
#endif
#endif

#define PP_IN_STEPS PP_STEPS
#include "decode_repack.h"
#endif

#if PP_IN_STEPS
#include "decode_step.h"
#endif

#if !PP_BY_HEADS
PP_FOR_HEADS(tile_of, (int heads, const pp_tile *tile, const float *q, int q_step, float *rows, float *m, int prefetch),
             (heads, tile, q, q_step, rows, m, prefetch),
             PP_NAME(tile)(HEADS, tile, q, q_step, rows, m, prefetch))

/* One part of a kv head's rows: those that see the same of the tile together.  Rows begin at row `from` of the head,
 * `row` of all. */
static void PP_NAME(part)(const pp_chunk *work, pp_tile *tile, int32_t from, int32_t to, int32_t row, int prefetch) {
    const int32_t q_step = PP_QUERY_PAIR * (to - from);
    const float *q = work->q + (int64_t)row * (tile->head_dim / 2 * PP_QUERY_PAIR);
#if PP_IN_STEPS
    if (tile->step) {
        tile->row = from;
        if (work->block_sums) tile->block_sums = work->block_sums + (int64_t)row * work->num_blocks;
        for (int32_t i = row; work->seen && i < row + to - from; i++) work->seen[i] = 1.0f;
        float *rows = work->rows + row * work->row_stride, *m = work->m + row;
        if (prefetch == PP_PREFETCH_REPEAT)
            PP_NAME(repeating_step_of)(to - from, tile, q, rows, m);
#if PP_WIDE
        else if (prefetch == PP_PREFETCH_PAST)
            PP_NAME(past_step_of)(to - from, tile, q, rows, m);
#endif
        else
            PP_NAME(quiet_step_of)(to - from, tile, q, rows, m);
        return;
    }
#endif
    for (int32_t r = from, end; r < to; r = end) {
        const int32_t at = row + r - from;
        end = rows_alike(work, tile, r, to, at);
        if (!tile->seen) continue;
        tile->row = r;
        if (work->block_sums) tile->block_sums = work->block_sums + (int64_t)at * work->num_blocks;
        float *rows = work->rows + at * work->row_stride, *m = work->m + at;
#if PP_STEPS && !defined(PP_DOT)
        if (end - r == to - from && PP_NAME(take_whole)(end - r, tile, q, rows, m, prefetch)) continue;
#endif
        PP_NAME(tile_of)(end - r, tile, q + PP_QUERY_PAIR * (r - from), q_step, rows, m, prefetch);
        prefetch = PP_PREFETCH_NONE;
    }
}

/* Parts of a head's rows read the same bytes one after the other: the first asks for what is read next. */
PP_INLINE int PP_NAME(part_prefetch)(int mode, int place, int parts, const pp_tile *tile) {
    (void)parts, (void)tile;
    return place == 0 ? mode : PP_PREFETCH_NONE;
}
#endif

/* The walk over a chunk.  `scratch` is for the groups of one tile of one head, as `tiled` lays them out; both are NULL
 * where the pages can be read as they are. */
static __attribute__((noinline)) void PP_NAME(walk)(const pp_chunk *work, const pp_kv_layout *tiled,
                                                    unsigned char *scratch) {
    const pp_kv_layout *layout = &work->pool->layout;
    const int32_t head_rows = work->group_size * work->view.num_queries, parts = num_parts(head_rows);
    pp_tile tile = {.head_dim = layout->head_dim,
                    .v_head_dim = layout->v_head_dim,
                    .scale = pp_in_base_2(work->sm_scale),
                    .cap = pp_in_base_2(work->logits_soft_cap),
                    .group_size = work->group_size,
                    .row_stride = work->row_stride,
                    .first_block = work->begin / layout->block_size,
                    .block_size = layout->block_size,
                    .num_blocks = (int)work->num_blocks};
    if (tile.cap != 0.0f) tile.inverse_cap = 1.0f / tile.cap;
    const int32_t first = row_of_part(head_rows, work->part_begin), last = row_of_part(head_rows, work->part_end);
    const int32_t head_begin = work->part_begin / parts;
    for (int32_t h = first; h < last; h++) work->m[h] = -FLT_MAX; /* and not -inf, which less -inf is NaN */
    memset(work->rows + first * work->row_stride, 0, (size_t)((last - first) * work->row_stride) * sizeof(float));
    if (work->seen) memset(work->seen + first, 0, (size_t)(last - first) * sizeof(float));
    if (work->block_sums)
        memset(work->block_sums + first * work->num_blocks, 0,
               (size_t)((last - first) * work->num_blocks) * sizeof(float));
    /* What is read about as fast as memory delivers: one row per kv head in 16 bit, or two in f32; and, by wide units
     * that ask past L2, up to 6 rows of heads of which two do not fit into L1. */
    const int64_t run_bytes = ((work->part_end + parts - 1) / parts - head_begin) * layout->head_bytes;
    const int is_long = run_bytes >= 1 << 17, is_large = layout->head_bytes > 1 << 13;
    const int repeats = pp_asks_again(work->prefetch), past = PP_WIDE && work->prefetch == PP_PREFETCH_PAST;
    const int is_fast = PP_WIDE ? past && head_rows <= 6 && is_large : head_rows <= PP_ITEM / 2 && is_long;
    const int in_runs = !PP_BY_HEADS && repeats && is_fast; /* by heads a third time took 1.2 times as long in f32 */
    const int asked = !PP_BY_HEADS && repeats && !past ? PP_PREFETCH_REPEAT : work->prefetch;
    const int mode = !layout->tiled ? PP_PREFETCH_NONE : in_runs ? PP_PREFETCH_RUN : asked;
    const int opens = work->prefetch != PP_PREFETCH_NONE && layout->tiled && !is_long && (!PP_WIDE || past);
    /* Two tiles at a time are read from where they are, and asked for again.  A prefetch into L1 comes twice as early
     * then: too early for what fits there, if heads are large and little is done with them.  And of runs the streams of
     * one tile are read faster than those of two. */
    const int fits_l1 = layout->head_bytes <= 1 << 12, is_slow = PP_WIDE && head_rows > 6;
    const int steps = PP_IN_STEPS && repeats && !in_runs && !scratch && layout->v_head_dim % PP_V_RUN == 0 &&
                      (!past || fits_l1 || is_slow);
    const int64_t first_tile = work->first / PP_TILE * PP_TILE, head_bytes = layout->head_bytes;
    const int64_t first_head = head_begin * head_bytes;
    const int num_groups = (int)((work->end - first_tile + PP_GROUP - 1) / PP_GROUP);
    const unsigned char *list[PP_CHUNK_GROUPS], *const *groups = list, *const *next;
    if (layout->tiled)
        pp_list_groups(work, work->end, list);
    else /* tiles are packed first */
        for (int i = 0; i < PP_CHUNK_GROUPS; i++) list[i] = work->layer;
    const unsigned char **behind = list + (num_groups + 1) / 2 * 2;
    for (int i = 0; i < 4 && work->next[i]; i++) behind[i] = distant(work->next[i], -first_head);
    const int64_t all_see = pp_first_seen(&work->view, work->view.num_queries - 1);
    const int64_t until = pp_until_all_see(&work->view);
    int opened = 0; /* the pages of groups before it are open */
    for (int64_t begin = first_tile, after; begin < work->end; begin = after, groups = next) {
        after = begin + 2 * PP_TILE;
        tile.step = steps && begin >= work->first && after <= work->end && begin >= all_see && after <= until;
        if (!tile.step) after = begin + PP_TILE;
        tile.begin = begin;
        tile.seen = pp_bits_between(work->first - begin, work->end - begin);
        tile.distance = begin - pp_position(&work->view, 0);
        next = groups + (after - begin) / PP_GROUP;
        while (opens && opened < num_groups && list + opened < next + 2 * PP_TILE / PP_GROUP)
            opened = open_pages(work, list, opened, num_groups, first_head, run_bytes);
        for (int32_t index = work->part_begin, head = head_begin, end; index < work->part_end; index = end, head++) {
            const int32_t head_end = (head + 1) * parts;
            end = head_end < work->part_end ? head_end : work->part_end;
            const int more_heads = end < work->part_end;
            const int64_t at = head * head_bytes, next_at = more_heads ? at + head_bytes : first_head;
            const unsigned char *const *then = more_heads ? groups : next;
            if (!layout->tiled) PP_OF_PAGES(pack)(work, tiled, begin, head, scratch);
            for (int i = 0; i < 4; i++) {
                tile.k[i] = groups[i] + at;
                tile.v[i] = tile.k[i] + layout->k_bytes;
                tile.next_k[i] = then[i] + next_at;
                tile.next_v[i] = scratch ? NULL : tile.next_k[i] + layout->k_bytes;
            }
            for (int i = 0; i < 2 && scratch; i++) {
                unsigned char *group = scratch + i * tiled->head_bytes;
                tile.v[i] = group + tiled->k_bytes;
                if (layout->tiled)
                    PP_OF_PAGES(transpose_v)(layout->v_head_dim, tile.k[i], group + tiled->k_bytes);
                else
                    tile.k[i] = group;
            }
            tile.alibi_slopes = work->alibi_slopes ? work->alibi_slopes + head * work->group_size : NULL;
#if PP_BY_HEADS
            PP_NAME(head)(work, &tile, head, index - head * parts, end - head * parts, mode);
#else
            for (int32_t part = index; part < end; part++)
                PP_NAME(part)(work, &tile, part_border(head_rows, part - head * parts),
                              part_border(head_rows, part + 1 - head * parts), row_of_part(head_rows, part),
                              PP_NAME(part_prefetch)(mode, part - index, end - index, &tile));
#endif
        }
    }
    for (int32_t h = first; h < last; h++) {
        float *sums = work->rows + (h + 1) * work->row_stride - PP_GROUP;
        pp_v sum[PP_GROUP / PP_LANES];
        for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = v_load(sums + j * PP_LANES);
        *sums = tree_sum(sum);
    }
}

/* The same with a scratch for two groups: K and V of plain pages, and V that lies within K. */
static __attribute__((noinline)) void PP_NAME(walk_arranged)(const pp_chunk *work) {
    const pp_kv_layout *layout = &work->pool->layout;
    pp_kv_layout tiled;
    pp_kv_layout_init_v(&tiled, 1, 1, layout->head_dim, layout->v_head_dim, 0, PP_GROUP, (pp_dtype)layout->dtype);
    if (layout->tiled) { /* K is read where it is */
        tiled.k_bytes = 0;
        tiled.head_bytes = tiled.v_bytes;
    }
    const size_t bytes = 2 * (size_t)tiled.head_bytes;
    unsigned char scratch[bytes + 64], *aligned = scratch + (64 - (uintptr_t)scratch % 64);
    memset(aligned, 0, bytes); /* lanes past the length are loaded, though never used */
    PP_NAME(walk)(work, &tiled, aligned);
}

static void PP_NAME(chunk)(const pp_chunk *work) {
    if (work->pool->layout.tiled && !work->pool->layout.v_in_k)
        PP_NAME(walk)(work, NULL, NULL);
    else
        PP_NAME(walk_arranged)(work);
}

#undef PP_NAME
#undef PP_OF_PAGES
#undef PP_DTYPE
#undef PP_PAGES
#undef PP_QUERY_PAIR
#undef PP_ITEM
#undef PP_COLUMN
#undef PP_DOT
#undef PP_BY_HEADS
#undef PP_IN_STEPS
#undef LOAD2
#undef LOAD2_HALF
#undef EVEN_ROW
#undef ODD_ROW
#undef WEIGH
#undef ADD_TO_BLOCKS
#undef SCORE_VECTORS
#undef V_DOT
#undef FLUSH_BEGIN
#undef FLUSH_END
#undef FLUSHES
#undef ROUND_WEIGHTS
