/* prefill_quantised.h: panels over quantised pages.  Included once per ISA, after quantised.h and prefill_kernel.h. */

/* Scores and values of a panel's tiles are computed for half of its rows at once. */
enum { PANEL_PASS = PP_PANEL / 2 };
_Static_assert((int)PANEL_PASS <= (int)PP_MAX_HEADS, "a pass has sums for half of a panel");

static __attribute__((noinline)) void int_scores_of_panel(const float *q, int32_t head_dim,
                                                          const unsigned char *const *k, float *s) {
    for (int r = 0; r < PP_PANEL; r += PANEL_PASS)
        int_scores(PANEL_PASS, k, r ? NULL : k + 2, head_dim, q + r * INT_WORDS, PP_PANEL * INT_WORDS, s + r * PP_TILE);
}

static __attribute__((noinline)) void int_values_of_panel(const pp_panel *panel, int t, int r0,
                                                          const unsigned char *const *v) {
    const int64_t stride = panel->call->sums_step;
    int_values(PANEL_PASS, v, r0 ? NULL : v + 2, panel->call->v_head_dim, panel->to->s[t] + r0 * PP_TILE,
               panel->to->raised[t] ? panel->to->rescale[t] + r0 : NULL, panel->sums + r0 * stride, stride);
}

static void lay_out_quantised(const pp_kv_layout *layout, int q_parts, panel_sizes *sizes) {
    lay_out_exact(layout, q_parts, sizes);
    sizes->groups = PP_CHUNK / PP_GROUP * pp_brought_in_bytes_of(layout);
}

static void pack_quantised(const panel_run *run, const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head,
                           int32_t q_dtype, void *to) {
    const float *queries[PP_QUERY_ROWS] = {NULL}, *channels = chunk->k_channel_scale;
    const int dims = run->call.head_dim;
    list_queries(run, panel, q_dtype, queries);
    transpose_quantised(to, NULL, PP_PANEL * INT_WORDS, queries, PP_PANEL, dims, run->call.tile.scale,
                        channels ? channels + (int64_t)kv_head * dims : NULL);
}

static void read_quantised(const panel_run *run, const pp_chunk *chunk, int32_t head, panel_chunk *to) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    const int64_t k_bytes = pp_brought_in_bytes(layout->dtype, layout->head_dim);
    unsigned char *copy = run->scratch.groups;
    const unsigned char *list[PP_CHUNK_GROUPS];
    const int groups = count_groups(to);
    pp_list_groups(chunk, chunk->end, list);
    for (int i = 0; i < groups; i++, copy += pp_brought_in_bytes_of(layout)) {
        const unsigned char *group = list[i] + head * layout->head_bytes;
        to->k[i] = bring_in(layout->dtype, 0, layout->head_dim, group, copy);
        to->v[i] = bring_in(layout->v_dtype, 1, layout->v_head_dim, group + layout->k_bytes, copy + k_bytes);
    }
    list_behind(groups, to->k, to->v);
}

static void scores_quantised(const pp_panel *panel) {
    for (int t = panel->first; t < panel->end; t++)
        int_scores_of_panel(panel->q, panel->call->head_dim, panel->chunk->k + 2 * t, panel->to->s[t]);
}

static void values_quantised(const panel_run *run, const pp_panel *panel) {
    (void)run;
    for (int t = panel->first; t < panel->end; t++)
        for (int r = 0; r < panel->rows; r += PANEL_PASS) int_values_of_panel(panel, t, r, panel->chunk->v + 2 * t);
}

static const panel_ways ways_quantised = {.lay_out = lay_out_quantised,
                                          .pack = pack_quantised,
                                          .read = read_quantised,
                                          .scores = scores_quantised,
                                          .softmax = softmax_exact,
                                          .values = values_quantised};

static void prefill_quantised(const pp_query_block *work) { run_prefill(work, &ways_quantised); }
static void shared_quantised(const pp_shared *work) { run_shared(work, &ways_quantised); }
static int64_t bytes_quantised(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows) {
    (void)arithmetic, (void)q_dtype;
    return panel_bytes(&ways_quantised, layout, 1, rows);
}

static const pp_way way_quantised = {chunk_quantised, prefill_quantised, shared_quantised, bytes_quantised,
                                     PP_PANEL,        BLOCK_ROWS,        PP_PANEL,         30};
