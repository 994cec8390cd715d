/* races.c: no access leaves the pool if another thread changes slots and block ids during a call. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "pagepool/attention.h"

enum { TOKENS = 64, DIMS = 64, CALLS = 20000 };

static int64_t slots[TOKENS];
static int32_t blocks[4];
static atomic_int stop;

/* Invalid values appear for a short time, usually between two reads of the array. */
static void *change(void *unused) {
    unsigned random = 1;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        random = random * 1664525u + 1013904223u;
        const unsigned t = random >> 8 & (TOKENS - 1);
        __atomic_store_n(&slots[t], (int64_t)1 << 45, __ATOMIC_RELAXED);
        __atomic_store_n(&blocks[t / 16], 1 << 30, __ATOMIC_RELAXED);
        __atomic_store_n(&slots[t], t, __ATOMIC_RELAXED);
        __atomic_store_n(&blocks[t / 16], (int32_t)t / 16, __ATOMIC_RELAXED);
        for (volatile int i = 0; i < 100; i++) continue;
    }
    return unused;
}

int main(void) {
    static const int32_t sizes[] = {16, 15};
    static float k[TOKENS * DIMS], v[TOKENS * DIMS], q[DIMS], out[DIMS];
    static const int32_t lens[1] = {TOKENS - 4};
    long done = 0;
    for (int i = 0; i < 2; i++) {
        pp_kv_pool pool = {.num_blocks = 5};
        CHECK(pp_kv_layout_init(&pool.layout, 1, 1, DIMS, sizes[i], PP_F32) == PP_OK);
        pool.base = calloc((size_t)pool.num_blocks, (size_t)pool.layout.block_bytes);
        CHECK(pool.base);
        for (int t = 0; t < TOKENS; t++) slots[t] = t;
        for (int b = 0; b < 4; b++) blocks[b] = b;
        pthread_t thread;
        atomic_store(&stop, 0);
        CHECK(pthread_create(&thread, NULL, change, NULL) == 0);
        for (int call = 0; call < CALLS; call++) {
            pp_status status = pp_kv_append(&pool, 0, slots, TOKENS, k, v, PP_F32, DIMS, DIMS);
            CHECK(status == PP_OK || status == PP_INVALID_SLOT);
            done += status == PP_OK;
            status = pp_kv_gather(&pool, 0, blocks, 4, 4 * sizes[i], k, v);
            CHECK(status == PP_OK || status == PP_INVALID_BLOCK);
            status = pp_decode(&(pp_decode_args){.pool = &pool,
                                                 .num_seqs = 1,
                                                 .num_qo_heads = 1,
                                                 .q = q,
                                                 .q_stride_seq = DIMS,
                                                 .q_stride_head = DIMS,
                                                 .block_tables = blocks,
                                                 .block_tables_stride = 4,
                                                 .block_tables_width = 4,
                                                 .seq_lens = lens,
                                                 .sm_scale = 1.0f,
                                                 .out = out},
                               1);
            CHECK(status == PP_OK || status == PP_INVALID_BLOCK);
        }
        atomic_store(&stop, 1);
        CHECK(pthread_join(thread, NULL) == 0);
        free(pool.base);
    }
    CHECK(done > 0);
    printf("ok\n");
    return 0;
}
