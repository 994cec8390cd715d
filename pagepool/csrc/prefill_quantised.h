/* prefill_quantised.h: prefill over quantised pages.  Included once per ISA, after quantised.h and prefill_kernel.h. */

/* Scores and values of a panel's tiles (prefill_common.h) are computed for half of its rows at once. */
enum { PANEL_PASS = PP_PANEL / 2 };
_Static_assert((int)PANEL_PASS <= (int)PP_MAX_HEADS, "a pass has sums for half of a panel");

static __attribute__((noinline)) void int_scores_of_panel(const float *q, int32_t head_dim,
                                                          const unsigned char *const *k, float *s) {
    for (int r = 0; r < PP_PANEL; r += PANEL_PASS)
        int_scores(PANEL_PASS, k, r ? NULL : k + 2, head_dim, q + r * INT_WORDS, PP_PANEL * INT_WORDS, s + r * PP_TILE);
}

static __attribute__((noinline)) void int_values_of_panel(const pp_panel *panel, int t, int r0,
                                                          const unsigned char *const *v) {
    int_values(PANEL_PASS, v, r0 ? NULL : v + 2, panel->v_head_dim, panel->s[t] + r0 * PP_TILE,
               panel->raised[t] ? panel->rescale[t] + r0 : NULL, panel->sums + r0 * panel->row_stride,
               panel->row_stride);
}

static void pack_panel_quantised(const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head, int32_t q_dtype,
                             float *widened, float *to) {
    const float *queries[PP_QUERY_ROWS] = {NULL}, *channels = chunk->k_channel_scale;
    list_queries(panel, q_dtype, widened, queries);
    transpose_quantised(to, NULL, PP_PANEL * INT_WORDS, queries, PP_PANEL, panel->head_dim, panel->tile.scale,
                        channels ? channels + (int64_t)kv_head * panel->head_dim : NULL);
}

static void read_chunk_quantised(const pp_chunk *chunk, int32_t head, const prefill_scratch *scratch,
                             const unsigned char **k, const unsigned char **v) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    const int64_t first = chunk->first / PP_TILE * PP_TILE;
    const int64_t k_bytes = pp_brought_in_bytes(layout->dtype, layout->head_dim);
    const int64_t step = pp_brought_in_bytes_of(layout);
    const unsigned char *list[PP_CHUNK_GROUPS];
    const int groups = (int)((chunk->end - first + PP_TILE - 1) / PP_TILE * 2);
    pp_list_groups(chunk, chunk->end, list);
    for (int i = 0; i < groups; i++) {
        const unsigned char *group = list[i] + head * layout->head_bytes;
        unsigned char *to = scratch->groups + i * step;
        k[i] = bring_in(layout->dtype, 0, layout->head_dim, group, to);
        v[i] = bring_in(layout->v_dtype, 1, layout->v_head_dim, group + layout->k_bytes, to + k_bytes);
    }
    list_behind(groups, k, v);
}

static void panel_chunk_quantised(pp_panel *panel, int64_t begin, const pp_kv_layout *layout,
                              const unsigned char *const *k, const unsigned char *const *v) {
    (void)layout;
    for (int t = panel->first; t < panel->end; t++)
        int_scores_of_panel(panel->q, panel->head_dim, k + 2 * t, panel->s[t]);
    panel_softmax(panel, begin);
    for (int t = panel->first; t < panel->end; t++)
        for (int r = 0; r < panel->rows; r += PANEL_PASS) int_values_of_panel(panel, t, r, v + 2 * t);
}

static const panel_ways ways_quantised = {pack_panel_quantised, read_chunk_quantised, panel_chunk_quantised};

static void prefill_quantised(const pp_query_block *work) { run_prefill(work, &ways_quantised); }
static void shared_quantised(const pp_shared *work) { run_shared(work, &ways_quantised); }
