// program.cpp: the headers from C++, each of them on its own first; a plan shared by std::threads.
#include "pagepool/status.h"
#include "pagepool/version.h"
#include "pagepool/layout.h"
#include "pagepool/cpu.h"
#include "pagepool/threads.h"
#include "pagepool/attention.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "scenario.h"

static void count_units(void *context, int64_t begin, int64_t end) {
    static_cast<std::atomic<int64_t> *>(context)->fetch_add(end - begin);
}

// V within K, several query tokens of each sequence, one of them under a mask, and the scores of blocks.
static void decode_latent() {
    const std::vector<int32_t> seq_lens = {700, 30};
    pp_kv_layout layout;
    CHECK(pp_kv_layout_init_v(&layout, 1, 1, 72, 64, 1, 16, PP_BF16) == PP_OK);
    scenario s;
    scenario_make_of(&s, &layout, 16, 2, seq_lens.data());
    for (int32_t seq = 0; seq < 2; seq++) scenario_append(&s, seq, 0, s.seq_lens[seq]);
    s.starts[1] = 3;
    s.starts[2] = 5;
    scenario_make_q(&s);

    const uint8_t tree[] = {0x99, 0x01}; // 3 rows of 3 bits: each sees itself, the last the first, too
    const int64_t indptr[] = {0, -1};
    const int32_t widths[] = {3, 0};
    const size_t rows = static_cast<size_t>(scenario_row_count(&s));
    std::vector<float> out(static_cast<size_t>(scenario_out_count(&s))), lse(rows);
    pp_decode_args args;
    scenario_args(&s, 0, out.data(), lse.data(), &args);
    args.query_start_loc = s.starts;
    args.custom_mask = tree;
    args.mask_indptr = indptr;
    args.mask_widths = widths;
    CHECK(pp_decode(&args, 3) == PP_OK);
    scenario_check(&s, &args);
    scenario_free(&s);
}

int main() {
    CHECK(pp_abi_version() == PP_ABI_VERSION);
    std::atomic<int64_t> counted{0};
    pp_parallel_for(3, 1000, count_units, &counted);
    CHECK(counted == 1000);

    const std::vector<int32_t> seq_lens = {700, 16, 1, 40};
    scenario s;
    scenario_make(&s, 1, 2, 4, 64, 16, PP_BF16, static_cast<int32_t>(seq_lens.size()), seq_lens.data());
    for (int32_t seq = 0; seq < s.num_seqs; seq++) scenario_append(&s, seq, 0, s.seq_lens[seq]);

    std::vector<float> out(static_cast<size_t>(scenario_out_count(&s)));
    pp_decode_args args;
    scenario_args(&s, 0, out.data(), nullptr, &args);
    size_t bytes = 0;
    CHECK(pp_decode_workspace(&args, &bytes) == PP_OK);
    void *workspace = scenario_memory(bytes);
    pp_decode_plan plan;
    CHECK(pp_decode_plan_init(&plan, &args, workspace, bytes) == PP_OK);
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++)
        threads.emplace_back([&] {
            for (int64_t unit = next++; unit < plan.num_units; unit = next++) pp_decode_run(&plan, unit, unit + 1);
        });
    for (std::thread &thread : threads) thread.join();
    scenario_check(&s, &args);
    std::free(workspace);
    scenario_free(&s);
    decode_latent();
    std::printf("ok %s\n", pp_isa());
    return 0;
}
