/* rates.c: compute rates of one core, on registers and on 16 KB in its L1 cache.
 *
 * Each function works for `seconds` and returns operations per second; call it from n threads at once for the rate of
 * n cores.  12 accumulators fit 16 registers and exceed latency times throughput of current CPUs (8 to 10).  Every sum
 * is used at the end, so that the compiler cannot remove the loop.  Built by bench/machine.py with -O3,
 * -ffp-contract=fast and -march=native. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif

typedef float floats __attribute__((vector_size(VECTOR)));
typedef float eights __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(VECTOR)));
typedef int32_t ints __attribute__((vector_size(VECTOR)));

enum { LANES = VECTOR / 4, SUMS = 12, LINES = 16384 / VECTOR / SUMS * SUMS, ROUNDS = 2000 };

static _Atomic uint32_t sink;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void use(const floats *sums, int n) {
    words all = {0};
    for (int i = 0; i < n; i++) all ^= (words)sums[i];
    uint32_t word = 0, lanes[LANES];
    memcpy(lanes, &all, sizeof all);
    for (int lane = 0; lane < LANES; lane++) word ^= lanes[lane];
    atomic_fetch_xor_explicit(&sink, word, memory_order_relaxed);
}

/* Calls `run` until `seconds` are over; returns operations per second. */
static double rate(double (*run)(void), double seconds) {
    double done = 0, spent;
    const double begin = now();
    do {
        done += run();
        spent = now() - begin;
    } while (spent < seconds);
    return done / spent;
}

/* x = x * m + b on every accumulator: one fused operation each, which counts as two flops. */
#define FMA_STRETCH(name, vector) \
    static double name(void) { \
        vector x[SUMS]; \
        const vector m = (vector){0} + 0.999f, b = (vector){0} + 0.001f; \
        for (int i = 0; i < SUMS; i++) x[i] = b * (float)i; \
        for (int round = 0; round < 10 * ROUNDS; round++) \
            for (int i = 0; i < SUMS; i++) x[i] = x[i] * m + b; \
        floats sums[sizeof x / sizeof(floats)]; \
        memcpy(sums, x, sizeof x); \
        use(sums, sizeof x / sizeof(floats)); \
        return 10.0 * ROUNDS * sizeof x / sizeof(float) * 2; \
    }
FMA_STRETCH(fma_stretch, floats)
#if VECTOR >= 32
FMA_STRETCH(fma_of_8_stretch, eights)
#endif

/* The 16 KB in L1 that the next two functions read.  `opened` hides them from the optimiser, which then reads them
 * again. */
static words lines[LINES];
static void opened(void) { __asm__ volatile("" : : "r"(lines) : "memory"); }

/* Widens pairs of bfloat16 from L1 by a shift and a mask, with one fused operation each.  A kernel with one query head
 * per KV head does the same. */
static double widen_stretch(void) {
    floats even[SUMS / 2] = {{0}}, odd[SUMS / 2] = {{0}};
    const floats q = (floats){0} + 0.5f;
    for (int round = 0; round < ROUNDS / 10; round++) {
        opened();
        for (int at = 0; at < LINES; at += SUMS / 2)
            for (int i = 0; i < SUMS / 2; i++) {
                const words pair = lines[at + i];
                even[i] += (floats)(pair << 16) * q;
                odd[i] += (floats)(pair & 0xffff0000u) * q;
            }
    }
    use(even, SUMS / 2);
    use(odd, SUMS / 2);
    return ROUNDS / 10 * (double)LINES * LANES * 4;
}

/* exp of values in L1, by a polynomial of degree 5 over the fraction and an integer shift into the exponent; counts
 * values. */
static double exp_stretch(void) {
    enum { N = 4 };
    floats sum[N] = {{0}};
    for (int round = 0; round < ROUNDS / 10; round++) {
        opened();
        for (int at = 0; at < LINES; at += N)
            for (int i = 0; i < N; i++) {
                const floats t = (floats)lines[at + i] * 1.44269504f;
                const floats shifted = t + 12582912.0f; /* adding 1.5 * 2^23 rounds t to an integer */
                const floats f = t - (shifted - 12582912.0f);
                floats p = f * 0.00133336f + 0.00961813f;
                p = p * f + 0.05550411f;
                p = p * f + 0.24022651f;
                p = p * f + 0.69314718f;
                p = p * f + 1.0f;
                sum[i] += (floats)((ints)p + ((ints)shifted << 23));
            }
    }
    use(sum, N);
    return ROUNDS / 10 * (double)LINES * LANES;
}

#if defined(__AVX512BF16__)
/* vdpbf16ps: two products of bfloat16 and their sum added to each float, four flops a lane. */
static double dot_stretch(void) {
    __m512 x[SUMS];
    const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = (__m512bh)_mm512_set1_epi32((int)0xbf803f80);
    for (int i = 0; i < SUMS; i++) x[i] = _mm512_set1_ps((float)i);
    for (int round = 0; round < 10 * ROUNDS; round++)
        for (int i = 0; i < SUMS; i++) x[i] = _mm512_dpbf16_ps(x[i], a, b);
    use((const floats *)x, SUMS);
    return 10.0 * ROUNDS * SUMS * LANES * 4;
}
#endif

#if defined(__AVX512VNNI__)
/* vpdpbusd: four products of bytes and their sum added to each integer, eight operations a lane. */
static double int8_stretch(void) {
    __m512i x[SUMS];
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
    for (int i = 0; i < SUMS; i++) x[i] = _mm512_set1_epi32(i);
    for (int round = 0; round < 10 * ROUNDS; round++)
        for (int i = 0; i < SUMS; i++) __asm__("vpdpbusd %2, %1, %0" : "+v"(x[i]) : "v"(a), "v"(b));
    use((const floats *)x, SUMS);
    return 10.0 * ROUNDS * SUMS * LANES * 8;
}
#endif

double rate_fma(double seconds) { return rate(fma_stretch, seconds); }

/* AVX2 vectors: some CPUs issue only as many of them per cycle as of AVX-512 vectors.  0 without AVX2. */
double rate_fma_of_8(double seconds) {
#if VECTOR >= 32
    return rate(fma_of_8_stretch, seconds);
#else
    (void)seconds;
    return 0;
#endif
}
double rate_widen(double seconds) { return rate(widen_stretch, seconds); }
double rate_exp(double seconds) { return rate(exp_stretch, seconds); }

/* 0 if the CPU lacks the instruction. */
double rate_dot(double seconds) {
#if defined(__AVX512BF16__)
    return rate(dot_stretch, seconds);
#else
    (void)seconds;
    return 0;
#endif
}
double rate_int8(double seconds) {
#if defined(__AVX512VNNI__)
    return rate(int8_stretch, seconds);
#else
    (void)seconds;
    return 0;
#endif
}
