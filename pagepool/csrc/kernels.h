/* kernels.h: what an instruction set provides, and the work it is given. */
#ifndef PP_KERNELS_H
#define PP_KERNELS_H

#include "pagepool/attention.h"

/* A chunk of one sequence, for some of its kv heads.  Starts from nothing and leaves, for each query head of those,
 *   m[h] = max score,   l[h] = sum exp(score - m),   o[h][:] = sum exp(score - m) * V
 * in the chunk's record. */
typedef struct pp_chunk {
    const pp_kv_pool *pool;
    const unsigned char *layer; /* pool->base + layer * layer_bytes */
    const int32_t *blocks;      /* the sequence's row of the block table */
    int64_t begin, end;         /* tokens; begin is a multiple of PP_CHUNK, 0 < end - begin <= PP_CHUNK */
    int32_t head_begin, head_end;
    int32_t group_size;         /* query heads per kv head */
    float sm_scale;
    const float *q;             /* the sequence's first query head */
    int64_t q_stride;           /* from one query head to the next, in elements */
    float *m, *l, *o;
    int64_t o_stride;           /* head_dim rounded up to 16 */
    const unsigned char *next[2]; /* what will be read after this chunk (K of two groups), to be prefetched; or NULLs */
} pp_chunk;

/* The first bytes (of all heads) of the two groups of the tile that begins at token `begin`; when the second lies past
 * the chunk's end, or in plain layouts, where tiles are packed first, the other pointer stands for it. */
static inline void pp_tile_groups(const pp_chunk *work, int64_t begin, const unsigned char **groups) {
    const pp_kv_layout *layout = &work->pool->layout;
    for (int i = 0; i < 2; i++) {
        const int64_t token = begin + i * PP_GROUP;
        if (i && token >= work->end) {
            groups[1] = groups[0];
            return;
        }
        const int64_t block = work->blocks[token / layout->block_size], offset = token % layout->block_size;
        groups[i] = work->layer + block * layout->block_bytes +
                    (layout->tiled ? offset / PP_GROUP * layout->group_bytes : 0);
    }
}

/* Merges a sequence's chunks in order and writes rows [head_begin, head_end) of its result. */
typedef struct pp_merge {
    const float *first;    /* the first chunk's record: o (num_qo_heads, o_stride), m (num_qo_heads,), l (num_qo_heads,) */
    int64_t record_stride; /* from one chunk's record to the next, in elements */
    int64_t num_chunks;    /* at least 1 */
    int32_t num_qo_heads, head_begin, head_end, head_dim;
    int64_t o_stride;
    float *out;            /* (num_qo_heads, head_dim) */
    float *lse;            /* NULL or (num_qo_heads,) */
} pp_merge;

typedef struct pp_kernels {
    const char *name;
    void (*chunk[3])(const pp_chunk *); /* by pp_dtype */
    void (*merge)(const pp_merge *);
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
