/* kernels.h: what an instruction set provides, and the work it is given. */
#ifndef PP_KERNELS_H
#define PP_KERNELS_H

#include "pagepool/attention.h"

/* Where to prefetch, as measured on shuffled pages.  Intel server cores (16 line fill buffers in L1) gain 5 to 20 %
 * with L2, AMD's Zen 5 with L1.  Zen 3 and 4 have 24 such buffers, too few, and drop a prefetch into L2 while its queue
 * of about 48 is full: each line is asked for again on the way, ever nearer, and the last time into L1. */
enum { PP_PREFETCH_NONE, PP_PREFETCH_L1, PP_PREFETCH_L2, PP_PREFETCH_REPEAT };
int pp_prefetch_mode(void);

/* A chunk of one sequence, for some of its kv heads.  Starts from nothing and leaves, for each query head h of those,
 * in the chunk's record
 *   rows[h][:v_head_dim]      = sum exp(score - m) * V
 *   rows[h][row_stride - 16]  = sum exp(score - m)        (16 running sums until the chunk is done)
 *   m[h]                      = max score */
typedef struct pp_chunk {
    const pp_kv_pool *pool;
    const unsigned char *layer; /* pool->base + layer * layer_bytes */
    const int32_t *blocks;      /* of the sequence's row of the block table, from the first that is read */
    int64_t first_block;        /* the logical number of blocks[0] */
    int64_t begin, end;         /* tokens; begin is a multiple of PP_CHUNK, 0 < end - begin <= PP_CHUNK */
    int64_t first;              /* the first token that is seen: begin <= first < end */
    int64_t last_position;      /* seq_len - 1, where the query stands */
    int32_t head_begin, head_end;
    int32_t group_size;         /* query heads per kv head */
    float sm_scale, logits_soft_cap;
    const float *alibi_slopes;  /* NULL, or (num_qo_heads,) */
    const float *q;             /* the sequence's queries as pack_queries lays them out */
    float *rows, *m;
    int64_t row_stride;         /* v_head_dim rounded up to 16, and 16 more */
    int prefetch;                 /* one of PP_PREFETCH_... */
    const unsigned char *next[2]; /* what will be read after this chunk (K of two groups), to be prefetched; or NULLs */
} pp_chunk;

/* The first bytes (of all heads) of the two groups of the tile that begins at token `begin`; for one without a token
 * that is seen the other stands.  In plain layouts tiles are packed first, and the layer's first byte stands for both.
 */
static inline void pp_tile_groups(const pp_chunk *work, int64_t begin, const unsigned char **groups) {
    const pp_kv_layout *layout = &work->pool->layout;
    groups[0] = groups[1] = layout->tiled ? NULL : work->layer;
    for (int i = 0; i < 2 && layout->tiled; i++) {
        const int64_t token = begin + i * PP_GROUP;
        if (token >= work->end || token + PP_GROUP <= work->first) continue;
        const int64_t block = work->blocks[token / layout->block_size - work->first_block];
        groups[i] = work->layer + block * layout->block_bytes +
                    token % layout->block_size / PP_GROUP * layout->group_bytes;
    }
    if (!groups[0]) groups[0] = groups[1];
    if (!groups[1]) groups[1] = groups[0];
}

/* Merges a sequence's chunks in order and writes rows [head_begin, head_end) of its result. */
typedef struct pp_merge {
    const float *first;    /* the first chunk's record: rows (num_qo_heads, row_stride), then m (num_qo_heads,) */
    int64_t record_stride; /* from one chunk's record to the next, in elements */
    int64_t num_chunks;    /* at least 1 */
    int32_t num_qo_heads, head_begin, head_end, v_head_dim;
    int64_t row_stride;
    float *out;            /* (num_qo_heads, v_head_dim) */
    float *lse;            /* NULL or (num_qo_heads,) */
    const float *sinks;    /* NULL or (num_qo_heads,) */
} pp_merge;

typedef struct pp_kernels {
    const char *name;
    void (*chunk[3])(const pp_chunk *); /* by pp_dtype */
    void (*merge)(const pp_merge *);
    void (*merge_rows)(const pp_merge_args *);
    /* Lays out a sequence's queries so that those of the heads that share a load are neighbours: for each kv head and
     * each such part of its group, [head_dim / 2][heads of the part][2]. */
    void (*pack_queries)(float *to, const float *q, int64_t q_stride, int32_t num_kv_heads, int32_t group_size,
                         int32_t head_dim);
    void (*narrow[3])(void *to, const float *from, int64_t n); /* f32 to pp_dtype, to nearest even; f32 is copied */
    void (*widen[3])(float *to, const void *from, int64_t n);  /* pp_dtype to f32, exactly */
} pp_kernels;

extern const pp_kernels pp_kernels_baseline;
#if defined(__x86_64__)
extern const pp_kernels pp_kernels_avx2;
extern const pp_kernels pp_kernels_avx512;
#elif defined(__aarch64__)
extern const pp_kernels pp_kernels_neon;
#endif

/* The kernels in use: chosen at the first call, the same ever after. */
const pp_kernels *pp_kernels_get(void);

#endif
