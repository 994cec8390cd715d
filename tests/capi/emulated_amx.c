/* emulated_amx.c: emulates the instructions of AMX in a program on an x86 CPU without AMX.  They raise SIGILL, and a
 * handler computes their result.  This tests the library's instructions and their operands.
 *
 * Defines pp_amx_state in place of the library's own. */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

int pp_amx_state(void);
int pp_amx_state(void) { return 2; /* permitted */ }

typedef struct tile {
    unsigned char rows[16][64];
} tile;
static _Thread_local struct {
    int configured, rows[8];
    tile data[8];
} state;

static void fail(const char *why) {
    fprintf(stderr, "emulated AMX: %s\n", why);
    abort();
}

/* Each number of c gets two chains of fma from 0, over the first and over the second elements of the pairs.  MXCSR is
 * set so that subnormal operands and results become zeros. */
__attribute__((target("avx2,fma"))) static void dot(int rows, tile *c, const tile *a, const tile *b) {
    const unsigned modes = _mm_getcsr();
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    _mm_setcsr(0x1f80 | 0x8040); /* to nearest, no traps, flushing */
    for (int m = 0; m < rows; m++)
        for (int half = 0; half < 64; half += 32) {
            __m256 first = _mm256_setzero_ps(), second = first;
            for (int k = 0; k < 16; k++) {
                uint32_t pair;
                memcpy(&pair, a->rows[m] + 4 * k, sizeof pair);
                const __m256i x = _mm256_set1_epi32((int)pair);
                const __m256i y = _mm256_loadu_si256((const __m256i *)(b->rows[k] + half));
                first = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                                        _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), first);
                second = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, upper)),
                                         _mm256_castsi256_ps(_mm256_and_si256(y, upper)), second);
            }
            float *to = (float *)(void *)(c->rows[m] + half);
            _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_add_ps(first, second)));
        }
    _mm_setcsr(modes);
}

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static void configure(const unsigned char *config) {
    if (config[0] != 1) fail("an unknown palette");
    memset(&state, 0, sizeof state);
    state.configured = 1;
    for (int t = 0; t < 8; t++) {
        state.rows[t] = config[48 + t];
        if (config[16 + 2 * t] != 64 || config[17 + 2 * t]) fail("a tile with rows of another size");
        if (state.rows[t] < 1 || state.rows[t] > 16) fail("a tile with another number of rows");
    }
}

/* Runs the instruction at the program counter, which moves behind it. */
static void on_illegal(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)registers[REG_RIP];
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) fail("an unknown instruction");
    const int high_index = !(at[1] & 0x40), high_base = !(at[1] & 0x20), prefix = at[2] & 3, opcode = at[3];
    const int third = ~at[2] >> 3 & 15, mod = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
    int length = 5;
    uintptr_t address = 0, step = 0;
    if (mod != 3) {
        int base = rm;
        if (rm == 4) {
            const int sib = at[length++], index = (sib >> 3 & 7) | high_index << 3;
            base = sib & 7;
            if (index != 4) step = (uintptr_t)registers[REGISTERS[index]] << (sib >> 6);
        }
        const int has_base = mod || base != 5;
        int32_t displacement = 0;
        if (mod == 1) {
            displacement = (int8_t)at[length++];
        } else if (mod == 2 || !has_base) {
            memcpy(&displacement, at + length, sizeof displacement);
            length += 4;
        }
        address = (uintptr_t)(intptr_t)displacement;
        if (has_base)
            address += (uintptr_t)registers[REGISTERS[base | high_base << 3]];
        else if (rm == 5)
            address += (uintptr_t)at + (uintptr_t)length;
    }
    tile *to = &state.data[reg];
    if (opcode != 0x49 && !state.configured) fail("tiles that are not configured");
    if (opcode == 0x49 && prefix == 0 && mod != 3) {
        configure((const unsigned char *)(address + step));
    } else if (opcode == 0x49 && prefix == 0) {
        memset(&state, 0, sizeof state);
    } else if (opcode == 0x49 && prefix == 3 && mod == 3) {
        memset(to, 0, sizeof *to);
    } else if (opcode == 0x4b && mod != 3 && (prefix == 3 || prefix == 1)) {
        memset(to, 0, sizeof *to);
        for (int r = 0; r < state.rows[reg]; r++)
            memcpy(to->rows[r], (const void *)(address + (uintptr_t)r * step), 64);
    } else if (opcode == 0x4b && mod != 3 && prefix == 2) {
        for (int r = 0; r < state.rows[reg]; r++) memcpy((void *)(address + (uintptr_t)r * step), to->rows[r], 64);
    } else if (opcode == 0x5c && mod == 3 && prefix == 2 && third < 8) {
        if (state.rows[reg] != state.rows[rm] || state.rows[third] != 16) fail("a product of tiles of different sizes");
        dot(state.rows[reg], to, &state.data[rm], &state.data[third]);
    } else {
        fail("an unknown instruction of AMX");
    }
    registers[REG_RIP] += length;
}

/* The library's threads block all signals: this one must reach them. */
int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
    sigset_t without;
    if (!set) return sigprocmask(how, NULL, old) ? errno : 0;
    without = *set;
    if (how != SIG_UNBLOCK) sigdelset(&without, SIGILL);
    return sigprocmask(how, &without, old) ? errno : 0;
}

__attribute__((constructor)) static void emulate(void) {
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGILL, &action, NULL)) fail("no handler");
}
