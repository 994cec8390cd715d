/* kernels.h: the kernels that an instruction set provides, and the structs that describe their work. */
#ifndef PP_KERNELS_H
#define PP_KERNELS_H

#include <float.h>
#include <math.h>

#include "pagepool/attention.h"
#include "draw.h"
#include "linear_quantised.h"
#include "page.h"
#include "view.h"

/* How often a function prefetches K and V before they are read: prefetch.h. */
enum { PP_PREFETCH_NONE, PP_PREFETCH_TWICE };

#if defined(__x86_64__)
/* Returns the time of `whole` divided by the time of `half`.  The functions run alternately, and the minimum of each is
 * used, because other programs only add time.  The result selects the kernels for 512-bit units: on such CPUs 512 bits
 * take as long as 256. */
double pp_time_over_half(uint64_t (*whole)(void), uint64_t (*half)(void));
#endif

/* Cuts the rows of a kv head into parts that share loads.  The parts have about equal sizes of up to `most`. */
static inline int32_t pp_num_parts(int32_t head_rows, int32_t most) {
    return head_rows / most + (head_rows % most != 0);
}
static inline int32_t pp_part_border(int32_t head_rows, int32_t most, int32_t part) {
    const int32_t parts = pp_num_parts(head_rows, most);
    if (parts == 1) return part * head_rows; /* usual case, avoids a division */
    return (int32_t)((int64_t)head_rows * part / parts);
}
/* The first row of a part; parts are numbered through all kv heads. */
static inline int32_t pp_row_of_part(int32_t head_rows, int32_t most, int32_t part) {
    const int32_t parts = pp_num_parts(head_rows, most);
    if (parts == 1) return part * head_rows;
    return part / parts * head_rows + pp_part_border(head_rows, most, part % parts);
}

/* A chunk of one sequence, for some of its rows.  A row is one query head of one query token; rows are numbered by kv
 * head first, then by query token, then by query head.
 *
 * Scores and their shifts are in base 2, logits times log2 e: a weight is 2^(score - m), which splits into a whole
 * number and a fraction without a multiplication.  The kernel does not read the record.  It writes, for each row r
 *   rows[r][:v_head_dim]      = sum 2^(score - m) * V
 *   rows[r][row_stride - 16]  = sum 2^(score - m)         (16 running sums until the chunk is done)
 *   m[r]                      = a score; every other score is at most PP_SLACK higher (decode_math.h)
 *   seen[r]                   = 1 if the row saw a token; if 0, the other results of the row are undefined */
typedef struct pp_chunk {
    const pp_kv_pool *pool;
    const unsigned char *layer; /* pool->base + layer * layer_bytes */
    const int32_t *blocks;      /* row of the block table, from the first block that is read */
    int64_t first_block;        /* the logical number of blocks[0] */
    int64_t begin, end;         /* the chunk's tokens; begin is a multiple of PP_CHUNK, 0 < end - begin <= PP_CHUNK */
    int64_t first;              /* the first token that the first query token sees: begin <= first < end */
    pp_view view;
    int32_t part_begin, part_end; /* parts of up to `max_rows` rows */
    int32_t row_begin, row_end;   /* their rows */
    int32_t group_size;         /* query heads per kv head */
    int32_t arithmetic, q_dtype; /* as in the call */
    float sm_scale, logits_soft_cap;
    const float *alibi_slopes;  /* NULL, or (num_qo_heads,), in base 2 */
    const float *k_channel_scale; /* NULL, or (num_kv_heads, head_dim) of the layer */
    const float *q;             /* the sequence's queries as pack_queries lays them out */
    float *rows, *m;
    float *seen;                /* NULL if the only query token sees all tokens from `first` on */
    int64_t row_stride;         /* v_head_dim rounded up to 16, and 16 more */
    unsigned char *scratch;     /* `bytes` of a panel's rows; in exact arithmetic and over quantised pages memory for
                                   two groups of one head, or NULL if the kernels read the pages directly */
    const unsigned char *next[4]; /* read after this chunk (K of 4 groups), prefetched; or NULLs */
} pp_chunk;

/* Stride of the rows of a record, in elements. */
static inline int64_t pp_row_stride(const pp_kv_layout *layout) {
    return (layout->v_head_dim + 15) / 16 * 16 + PP_GROUP;
}

/* Address in a tiled layout (of all heads) of the group of the token at `offset` of page blocks[index]. */
static inline const unsigned char *pp_group(const pp_chunk *work, int64_t index, int64_t offset) {
    const pp_kv_layout *layout = &work->pool->layout;
    return work->layer + work->blocks[index] * layout->block_bytes + offset / PP_GROUP * layout->group_bytes;
}

/* Lists the address in a tiled layout (of all heads) of each group of the chunk before token `end`, beginning with the
 * first tile, and 4 more.  If a group has no visible token, the other group of its tile is listed in its position.  The
 * entries after the last tile repeat that tile. */
enum { PP_CHUNK_GROUPS = PP_CHUNK / PP_GROUP + 4 };
static inline void pp_list_groups(const pp_chunk *work, int64_t end, const unsigned char **groups) {
    const int64_t block_size = work->pool->layout.block_size, first = work->first / PP_GROUP * PP_GROUP;
    const int64_t before = first % PP_TILE / PP_GROUP;
    int64_t index = first / block_size - work->first_block, offset = first % block_size, count = before;
    if (end > work->end) end = work->end;
    for (int64_t token = first; token < end; token += PP_GROUP) {
        groups[count++] = pp_group(work, index, offset);
        offset += PP_GROUP;
        if (offset == block_size) {
            offset = 0;
            index++;
        }
    }
    if (before) groups[0] = groups[1];
    if (count % 2) groups[count] = groups[count - 1], count++;
    for (int i = 0; i < 4; i++) groups[count + i] = groups[count - 2 + i % 2];
}

/* Bytes of scratch for one head's quantised K or V of a group, if the kernels cannot read the page directly: int4 is
 * converted to the order of int8. */
static inline int64_t pp_brought_in_bytes(int32_t dtype, int64_t dims) {
    return dtype == PP_INT4 ? pp_scales_at(PP_INT8, dims) + PP_GROUP * (int64_t)sizeof(float) : 0;
}

/* The same for K and V together. */
static inline int64_t pp_brought_in_bytes_of(const pp_kv_layout *layout) {
    return pp_brought_in_bytes(layout->dtype, layout->head_dim) +
           pp_brought_in_bytes(layout->v_dtype, layout->v_head_dim);
}

/* Merges a sequence's chunks in order and writes the results of the rows of `chunk`. */
typedef struct pp_merge {
    const pp_chunk *chunk;   /* the first chunk; the arrays of consecutive records are record_stride apart */
    int64_t record_stride;   /* in elements */
    int64_t num_chunks;      /* at least 1 */
    int32_t num_qo_heads, v_head_dim;
    void *out;               /* (num_queries, num_qo_heads, v_head_dim) */
    int32_t out_dtype;
    float *lse;              /* NULL or (num_queries, num_qo_heads) */
    const float *sinks;      /* NULL or (num_qo_heads,) */
} pp_merge;

/* Queries of a sequence in the caller's memory.  Element d of a head is at token * stride_token + head * stride_head +
 * d, in elements of `dtype`. */
typedef struct pp_queries {
    const void *q;
    int64_t stride_token, stride_head;
    int32_t dtype;
    float *widened; /* room for 8 heads' queries in f32, unless dtype is PP_F32 */
} pp_queries;

/* Address of the query of a token and head. */
static inline const void *pp_query_at(const pp_queries *from, int64_t token, int64_t head) {
    const int64_t at = token * from->stride_token + head * from->stride_head;
    return (const char *)from->q + at * (from->dtype == PP_F32 ? (int64_t)sizeof(float) : 2);
}

/* A row of a panel: one query head of one query token, of any sequence. */
typedef struct pp_row {
    const pp_view *view;
    int32_t query;    /* query token of its sequence */
    int32_t row;      /* index of the row among the rows of its kv head and sequence */
    const void *q;    /* head_dim elements of `q_dtype` */
    float *sums, *m;  /* pointers into the record of its sequence; `seen` may be NULL */
    float *seen;
} pp_row;

/* A chunk that several sequences share, for all their rows of one kv head.  The rows are computed in panels. */
typedef struct pp_shared {
    pp_chunk chunk;         /* of one of the sequences */
    int32_t kv_head, q_dtype;
    /* Fills in the next rows, at most panel_rows, sequence by sequence.  Returns their number: 0 after the last row. */
    int (*next_rows)(void *context, pp_row *rows);
    void *context;
    unsigned char *scratch; /* `bytes` of a panel's rows */
} pp_shared;

/* Prefill: query tokens [query_begin, query_end) of a sequence, for the query heads of one kv head, over all tokens
 * that they see.  Writes their results.  The bits are the same as those from chunks and merging. */
typedef struct pp_query_block {
    pp_chunk chunk;     /* filled in by fill_chunk for the first chunk, then updated for each chunk */
    pp_queries queries; /* of the sequence, from its first query token on */
    int32_t kv_head, query_begin, query_end, num_qo_heads;
    void *out;          /* results of the sequence, from its first query token on */
    int32_t out_dtype;
    float *lse;         /* NULL, or of the sequence's first query token */
    const float *sinks; /* NULL or (num_qo_heads,) */
    unsigned char *scratch; /* `bytes` of its rows */
} pp_query_block;

/* K or V of one kv head for adjacent tokens, all in one group of a tiled page. */
typedef struct pp_rows {
    unsigned char *to;          /* the head's K or V in the group */
    const unsigned char *ahead; /* the lines that are written next, to prefetch */
    int32_t is_v, dtype;
    int32_t dims;
    int32_t token, count;       /* position of the first token in the group; token + count <= PP_GROUP */
    const unsigned char *from;  /* the first token's elements; tokens are `step` bytes apart */
    int64_t step;
    const unsigned char *next;  /* the rows that are read next, to prefetch: next_count rows */
    int32_t next_count;
    int32_t from_dtype;         /* of `from`; converted to `dtype` if it differs (to nearest even, or quantised) */
    const float *channel_scale; /* NULL, or a divisor for each dim, applied before quantising */
} pp_rows;

/* The ways to compute: exactly; by products of tiles ("bf16", "bf16x2": tiles_panel.h); or over quantised pages. */
enum { PP_WAY_EXACT, PP_WAY_TILES, PP_WAY_QUANTISED, PP_NUM_WAYS };

/* The kernels of a way.  `shared` writes the same records as `chunk` does for each sequence. */
typedef struct pp_way {
    void (*chunk)(const pp_chunk *);
    void (*prefill)(const pp_query_block *);
    void (*shared)(const pp_shared *);
    int64_t (*bytes)(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows); /* of scratch */
    int32_t panel_rows, block_rows; /* rows of a panel; of a block of query tokens, about */
    /* Cost model: a panel is computed in steps of `step_rows` rows.  In a full step, a product with one part of queries
     * or weights costs `part_cost` hundredths of a multiply-add per element and row. */
    int32_t step_rows, part_cost;
} pp_way;

/* Number of bf16 parts that add up to any number of a dtype: in PP_WAY_TILES the parts of K and V. */
enum { PP_MOST_PARTS = 3 };
static inline int pp_parts_of(int32_t dtype) { return dtype == PP_BF16 ? 1 : dtype == PP_F16 ? 2 : PP_MOST_PARTS; }
/* Number of parts of a query: in "bf16x2" enough to represent it, in "bf16" one.  Then of a weight. */
static inline int pp_query_parts(int32_t arithmetic, int32_t q_dtype) {
    return arithmetic == PP_ROUNDED_BF16 ? 1 : pp_parts_of(q_dtype);
}
static inline int pp_weight_parts(int32_t arithmetic) { return arithmetic == PP_ROUNDED_BF16 ? 1 : 2; }

/* A call of pp_linear_few. */
typedef struct pp_linear {
    const unsigned char *tiles; /* x: for each 32 rows [inputs / 32][32][64 bytes] */
    int64_t rows, inputs, outputs;
    const void *weight;
    const uint16_t *bias; /* or NULL */
    uint16_t *out;
} pp_linear;

/* Rows of x in a call of pp_linear_quantised, rounded to 8 bits.  `height` rows are stored together, group by group.
 * Rows of q have the PP_QUANTISED_GROUP integers of a group.  Missing rows of the last tile are undefined. */
typedef struct pp_quantised_rows {
    int8_t *q;                 /* [tiles][groups][height][32] */
    float *scale, *scaled_sum; /* [tiles][groups][height]; scaled_sum = scale * sum */
    int32_t *sum;              /* of a group's integers */
    int64_t count, groups, height; /* height is PP_QUANTISED_HEIGHT, or less if there are fewer rows */
    int32_t dtype;             /* of x and of the results */
} pp_quantised_rows;
enum { PP_QUANTISED_HEIGHT = 16, PP_QUANTISED_PANEL = 128 /* rows of a call of a kernel, at most */ };

/* Returns the index of a row's first group in the arrays above.  Its next group is `height` later. */
static inline int64_t pp_place_of_row(const pp_quantised_rows *rows, int64_t row) {
    return row / rows->height * rows->groups * rows->height + row % rows->height;
}

typedef struct pp_kernels {
    const char *name;
    const pp_way *ways[PP_NUM_WAYS];
    /* Reads K and V of one head of a chunk, in 16 bits, in the order of tiled pages.  Lists their groups: addresses in
     * the pages, or copies in `groups`, which has tiled_bytes bytes. */
    int64_t (*tiled_bytes)(const pp_kv_layout *layout);
    void (*read_tiled)(const pp_chunk *chunk, int32_t head, unsigned char *groups, const unsigned char **k,
                       const unsigned char **v);
    void (*merge)(const pp_merge *);
    void (*merge_rows)(const pp_merge_args *);
    /* Lays out the queries of a sequence, part by part: [head_dim / 2][rows of the part][2] floats.  Each float is a
     * scaled element, so that products with K are scores.  For products of tiles, rows are stored unchanged.  For
     * quantised K the layout is described in quantised.h. */
    void (*pack_queries[PP_NUM_WAYS])(float *to, const pp_queries *from, const pp_kv_layout *layout, int32_t group_size,
                                      int32_t num_queries, float sm_scale, const float *k_channel_scale);
    int32_t max_rows; /* of a part */
    void (*write_rows)(const pp_rows *);
    void (*narrow[3])(void *to, const float *from, int64_t n); /* f32 to pp_dtype, to nearest even; f32 is copied */
    void (*widen[3])(float *to, const void *from, int64_t n);  /* pp_dtype to f32, exactly */
    void (*weigh_tokens)(const float *logits, int64_t n, float most, float scale, float *weights, float *sums);
    void (*keep_ahead)(float *weights, int64_t num_chunks, int64_t place, float *sums);
    /* One row each of elementwise.h. */
    void (*rms_norm_row)(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t n,
                         uint16_t *sum, uint16_t *out);
    void (*rotate_row)(uint16_t *x, const uint16_t *cos, const uint16_t *sin, int64_t heads, int64_t dim);
    void (*lookup_mul_row)(const uint16_t *gate, const uint16_t *up, const uint16_t *table, int64_t n, uint16_t *out);
    /* Computes the blocks of 32 outputs from `begin` to before `end`.  May be NULL. */
    void (*linear)(const pp_linear *work, int64_t begin, int64_t end);
    /* linear_quantised.h.  The second one computes blocks [begin, end) of outputs for `count` rows from `row` on, and
     * writes output 0 of the first row to `to`.  Rows of results are `stride` bytes apart. */
    void (*quantise_x)(const void *x, const pp_quantised_rows *rows, int64_t row);
    void (*linear_quantised)(const pp_quantised *weight, const pp_quantised_rows *rows, int64_t row, int64_t count,
                             int64_t begin, int64_t end, char *to, int64_t stride);
    /* The same by products of tiles, PP_QUANTISED_HEIGHT rows at a time.  May be NULL. */
    void (*linear_tiles)(const pp_quantised *weight, const pp_quantised_rows *rows, int64_t row, int64_t count,
                         int64_t begin, int64_t end, char *to, int64_t stride);
} pp_kernels;

extern const pp_way pp_tiles_baseline;
extern const pp_kernels pp_kernels_baseline;
#if defined(__x86_64__)
extern const pp_way pp_tiles_avx2, pp_tiles_amx;
void pp_linear_by_amx(const pp_linear *work, int64_t begin, int64_t end);
extern const int pp_tiles_amx_portable; /* pp_tiles_amx needs no AMX: simd_tiles.h */
extern const pp_kernels pp_kernels_avx2, pp_kernels_avx512, pp_kernels_avx512_wide, pp_kernels_amx;
#elif defined(__aarch64__)
extern const pp_way pp_tiles_neon;
extern const pp_kernels pp_kernels_neon, pp_kernels_neon_dotprod;
#endif

/* Returns the kernels to use for quantised pages and weights: `kernels`, or kernels of AVX2 if the CPU lacks
 * AVX512_VNNI. */
const pp_kernels *pp_kernels_quantised(const pp_kernels *kernels);

/* The kernels in use.  They are selected at the first call and never change afterwards. */
const pp_kernels *pp_kernels_get(void);

/* Logits are in base 2.  From the queries to the log of a sum, all values are multiplied by log2 e, because 2^x takes
 * fewer operations than exp. */
#define PP_LOG2_E 1.4426950408889634
#define PP_LN_2 0.6931471805599453

/* Converts a logit or a factor of logits to base 2.  An overflow gives the largest float instead of an infinity,
 * because an infinity times 0 would be NaN. */
static inline float pp_in_base_2(float x) {
    const double scaled = x * PP_LOG2_E;
    return isfinite(x) && fabs(scaled) > FLT_MAX ? copysignf(FLT_MAX, x) : (float)scaled;
}

/* log(2^shift * total), in base e. */
static inline float pp_lse(float shift, float total) { return (float)(shift * PP_LN_2 + log(total)); }

#endif
