/* pack_queries.h: stores queries in the order in which the kernels read them (see kernels.h).  Included once per ISA.
 *
 * Pairs of dims are consecutive, and each pair has all rows of a part.  A part is a transposed matrix with pairs as
 * elements. */

/* Swaps the middle halves of a 64-bit word.  This transposes a square of 2 x 2 elements of 16 bits. */
#define PP_TRANSPOSE_SQUARE(word) \
    (((word) & 0xffff00000000ffffu) | (((word) & 0xffff0000u) << 16) | (((word) >> 16) & 0xffff0000u))

enum { PP_PAIRS = PP_LANES / 2 }; /* pairs of lanes in a vector, and rows that v_transpose_pairs transposes at once */

/* Column r of `from` becomes row r of `to`; steps in bytes. */
PP_INLINE void transpose_squares(unsigned char *to, int64_t to_step, const unsigned char *from, int64_t from_step) {
    typedef uint64_t squares __attribute__((vector_size(PP_PAIRS * sizeof(uint64_t))));
    pp_v a[PP_PAIRS];
    PP_UNROLL for (int i = 0; i < PP_PAIRS; i++) {
        squares x;
        memcpy(&x, from + i * from_step, sizeof x);
        a[i] = (pp_v)PP_TRANSPOSE_SQUARE(x);
    }
    v_transpose_pairs(a);
    PP_UNROLL for (int i = 0; i < PP_PAIRS; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
}

enum { PP_PAIR_FLOATS = 2 };
_Static_assert(PP_MAX_HEADS <= 8 && 8 % PP_PAIRS == 0, "8 rows are whole squares");

/* Transposes PP_LANES dims of all rows, times `scale`, in squares of PP_PAIRS rows and PP_PAIRS pairs.  Consecutive
 * pairs are `step` floats apart.  `row` must have 8 readable pointers; the data of the pointers past `rows` is ignored.
 * Each pair is written as whole vectors: later pairs overwrite the part beyond its rows, and the last vectors are cut
 * at `end`. */
static void transpose_queries(float *to, const float *end, int64_t step, const float *const *row, int32_t rows,
                              int32_t head_dim, float scale, const float *unused) {
    enum { SQUARES = (PP_MAX_HEADS + PP_PAIRS - 1) / PP_PAIRS };
    const int squares = (rows + PP_PAIRS - 1) / PP_PAIRS;
    int32_t d = 0;
    (void)unused;
    for (; d + PP_LANES <= head_dim; d += PP_LANES) {
        pp_v transposed[SQUARES][PP_PAIRS];
        PP_UNROLL for (int s = 0; s < SQUARES; s++) {
            if (s >= squares) continue;
            PP_UNROLL for (int i = 0; i < PP_PAIRS; i++)
                transposed[s][i] = v_mul(v_load(row[s * PP_PAIRS + i] + d), v_set1(scale));
            v_transpose_pairs(transposed[s]);
        }
        PP_UNROLL for (int i = 0; i < PP_PAIRS; i++, to += step)
            PP_UNROLL for (int s = 0; s < SQUARES; s++) {
                float *at = to + s * PP_LANES;
                if (s >= squares) continue;
                if (end - at >= PP_LANES)
                    v_store(at, transposed[s][i]);
                else /* the last pairs end at `end` */
                    memcpy(at, &transposed[s][i], (size_t)(end - at) * sizeof *at);
            }
    }
    for (; d < head_dim; d += PP_PAIR_FLOATS, to += step)
        for (int32_t r = 0; r < rows; r++)
            for (int i = 0; i < PP_PAIR_FLOATS; i++) to[r * PP_PAIR_FLOATS + i] = row[r][d + i] * scale;
}

/* `channel_scale` of each dim for quantised K, otherwise NULL. */
typedef void transpose_rows(float *to, const float *end, int64_t step, const float *const *row, int32_t rows,
                            int32_t head_dim, float scale, const float *channel_scale);

PP_INLINE void pack_parts(transpose_rows *transpose, const int pair_floats, float *to, const pp_queries *from,
                          const pp_kv_layout *layout, int32_t group_size, int32_t num_queries, float scale,
                          const float *channel_scale) {
    const int32_t head_rows = group_size * num_queries, num_kv_heads = layout->num_kv_heads;
    const int32_t head_dim = layout->head_dim;
    for (int32_t kv = 0; kv < num_kv_heads; kv++) {
        int64_t query = 0, head = 0; /* row by row: all heads of a query, then all heads of the next query */
        for (int32_t part = 0; part < pp_num_parts(head_rows, PP_MAX_HEADS); part++) {
            const int32_t rows = pp_part_border(head_rows, PP_MAX_HEADS, part + 1) -
                                 pp_part_border(head_rows, PP_MAX_HEADS, part);
            const int64_t size = (int64_t)rows * (head_dim / 2) * pair_floats;
            const float *row[8] = {NULL};
            for (int32_t r = 0; r < rows; r++) {
                row[r] = row_in_f32(from->dtype, pp_query_at(from, query, (int64_t)kv * group_size + head),
                                       from->widened + r * head_dim, head_dim);
                if (++head < group_size) continue;
                head = 0;
                query++;
            }
            for (int32_t r = rows; r < 8; r++) row[r] = row[0];
            transpose(to, to + size, (int64_t)pair_floats * rows, row, rows, head_dim, scale,
                      channel_scale ? channel_scale + (int64_t)kv * head_dim : NULL);
            to += size;
        }
    }
}

static void pack_queries(float *to, const pp_queries *from, const pp_kv_layout *layout, int32_t group_size,
                         int32_t num_queries, float sm_scale, const float *unused) {
    pack_parts(transpose_queries, PP_PAIR_FLOATS, to, from, layout, group_size, num_queries,
               pp_in_base_2(sm_scale), unused);
}

/* Stores the rows unscaled as f32, one after another: for products of tiles. */
static void pack_plain_queries(float *to, const pp_queries *from, const pp_kv_layout *layout, int32_t group_size,
                               int32_t num_queries, float sm_scale, const float *unused) {
    const size_t bytes = (size_t)layout->head_dim * sizeof(float);
    (void)sm_scale, (void)unused;
    for (int32_t kv = 0; kv < layout->num_kv_heads; kv++)
        for (int32_t query = 0; query < num_queries; query++)
            for (int32_t head = 0; head < group_size; head++, to += layout->head_dim)
                memcpy(to,
                       row_in_f32(from->dtype, pp_query_at(from, query, (int64_t)kv * group_size + head), from->widened,
                                  layout->head_dim),
                       bytes);
}

/* Packs the queries of a panel (panel.h): [head_dim / 2][PP_PANEL][2].  The last rows are written first,
 * because their whole vectors extend into the first rows of the next pair. */
enum { PP_QUERY_ROWS = (PP_PANEL + 7) / 8 * 8 }; /* pointers that are read */
_Static_assert(PP_PANEL <= PP_MAX_HEADS || PP_MAX_HEADS % PP_PAIRS == 0, "the first rows write no others' places");
static void transpose_panel(float *to, const float *const *row, int32_t head_dim, float scale) {
    const int64_t step = PP_PAIR_FLOATS * PP_PANEL;
    const float *end = to + step * (head_dim / 2);
    for (int first = (PP_PANEL - 1) / PP_MAX_HEADS * PP_MAX_HEADS; first >= 0; first -= PP_MAX_HEADS)
        transpose_queries(to + PP_PAIR_FLOATS * first, end, step, row + first,
                          PP_PANEL - first < PP_MAX_HEADS ? PP_PANEL - first : PP_MAX_HEADS, head_dim, scale, NULL);
}
