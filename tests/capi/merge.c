/* merge.c: pp_merge_states against a loop in double, with strides of both signs; bad arguments write nothing. */
#include "scenario.h"

enum { ROWS = 5, PARTS = 3, DIM = 19 };

/* The same numbers with other strides: element (row, part, dim) of v and (row, part) of s. */
static float v[ROWS * PARTS * DIM], s[ROWS * PARTS], out[ROWS * DIM], lse[ROWS];

static void fill(int64_t v_row, int64_t v_part, int64_t s_row, int64_t s_part, pp_merge_args *args) {
    float *first_v = v, *first_s = s;
    if (v_row < 0) first_v -= (ROWS - 1) * v_row;
    if (s_part < 0) first_s -= (PARTS - 1) * s_part;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < PARTS; i++) {
            first_s[r * s_row + i * s_part] = (r + i) % 4 ? scenario_number(0, 0, r, 0, i) : -INFINITY;
            for (int d = 0; d < DIM; d++)
                first_v[r * v_row + i * v_part + d] = scenario_number(1, i, r, 0, d);
        }
    *args = (pp_merge_args){.num_rows = ROWS,
                            .num_parts = PARTS,
                            .head_dim = DIM,
                            .v = first_v,
                            .v_stride_row = v_row,
                            .v_stride_part = v_part,
                            .s = first_s,
                            .s_stride_row = s_row,
                            .s_stride_part = s_part,
                            .out = out,
                            .lse = lse};
}

static void check_right(const pp_merge_args *args) {
    CHECK(pp_merge_states(args) == PP_OK);
    for (int r = 0; r < ROWS; r++) {
        double total = 0, sum[DIM] = {0};
        for (int i = 0; i < PARTS; i++) {
            const double weight = exp((double)args->s[r * args->s_stride_row + i * args->s_stride_part]);
            total += weight;
            for (int d = 0; d < DIM; d++)
                sum[d] += weight * (double)args->v[r * args->v_stride_row + i * args->v_stride_part + d];
        }
        CHECK(fabs((double)lse[r] - log(total)) < 1e-5);
        for (int d = 0; d < DIM; d++) CHECK(fabs((double)out[r * DIM + d] - sum[d] / total) < 1e-5);
    }
}

static void check_refused(const pp_merge_args *args) {
    float before[3] = {out[0], lse[0], v[0]}, after[3];
    CHECK(pp_merge_states(args) == PP_INVALID_ARGUMENT);
    after[0] = out[0], after[1] = lse[0], after[2] = v[0];
    CHECK(memcmp(before, after, sizeof before) == 0);
}

int main(void) {
    pp_merge_args good, bad;
    fill(-PARTS * DIM, DIM, PARTS, -1, &good);
    check_right(&good);
    fill(DIM, ROWS * DIM, 1, ROWS, &good);
    check_right(&good);
    for (int way = 0; way < 15; way++) {
        bad = good;
        if (way == 0) bad.num_rows = -1;
        if (way == 1) bad.num_parts = -1;
        if (way == 2) bad.head_dim = -1;
        if (way == 3) bad.head_dim = (1 << 24) + 1;
        if (way == 4) bad.num_rows = INT64_MAX / 2;
        if (way == 5) bad.v = NULL;
        if (way == 6) bad.s = NULL;
        if (way == 7) bad.out = NULL;
        if (way == 8) bad.out = v + ROWS * PARTS * DIM - 1;
        if (way == 9) bad.lse = s;
        if (way == 10) bad.lse = out + ROWS * DIM - 1;
        if (way == 11) bad.out = s + ROWS * PARTS - 1;
        if (way == 12) { /* negative stride, starting at the last row */
            fill(-PARTS * DIM, DIM, PARTS, -1, &bad);
            bad.lse = v;
        }
        if (way == 13) bad.v_stride_row = INT64_MAX / 4;
        if (way == 14) bad.s_stride_part = INT64_MIN;
        check_refused(&bad);
    }
    fill(DIM, ROWS * DIM, 1, ROWS, &good);
    good.num_parts = 0;
    good.v = good.s = NULL;
    CHECK(pp_merge_states(&good) == PP_OK);
    for (int r = 0; r < ROWS; r++) CHECK(lse[r] == -INFINITY && out[r * DIM] == 0.0f);
    good.num_rows = 0;
    good.out = good.lse = NULL;
    CHECK(pp_merge_states(&good) == PP_OK);
    printf("ok %s\n", pp_isa());
    return 0;
}
