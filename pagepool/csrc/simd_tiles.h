/* simd_tiles.h: AMX tile operations: 8 tiles, 0 to 7, of up to 16 rows of 64 bytes.
 *
 *   default             AMX's instructions
 *   PP_TILES_PORTABLE   plain C with the same bits on every CPU: for tests without AMX, and for sanitizers, which do
 *                       not see loads and stores of tiles
 *
 * The number of a tile is part of the instruction and must be a literal.
 *
 * The instructions are written in assembler. gcc 12's _tile_loadconfig and _tile_loadd do not declare the memory that
 * they read.  With -O3 a store just before them is dropped or moved behind them, and LDTILECFG faults.  Assembler also
 * needs no target pragma, but it needs binutils 2.35 or later. */
#ifndef PP_SIMD_TILES_H
#define PP_SIMD_TILES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !PP_UNROLLS && !defined(PP_TILES_PORTABLE)
#define PP_TILES_PORTABLE
#endif

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES, NUM_TILES = 8, LAST_OF_ROWS = 5 };

#ifndef PP_TILES_PORTABLE

/* The operand of LDTILECFG. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_config;
_Static_assert(sizeof(tile_config) == 64, "as LDTILECFG reads it");

/* Tiles may be used between tiles_begin, which takes 50 ns, and tiles_end.  Code in between must not call functions
 * that may use tiles.  While tiles are in use, a context switch saves 8 KB more.
 *
 * Tiles 0 to 5 have `rows` rows, tiles 6 and 7 have 16.  A product of 4 rows takes 0.6 of the time of 16 rows. */
static inline void tiles_begin(int rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < NUM_TILES; i++) {
        config.row_bytes[i] = TILE_ROW_BYTES;
        config.rows[i] = (uint8_t)(i <= LAST_OF_ROWS ? rows : TILE_ROWS);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
/* The same for tile_dot_bytes over 32 inputs: tiles 4 and 5 have rows of 32 bytes, tiles 6 and 7 have 8 rows. */
static inline void tiles_begin_bytes(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < NUM_TILES; i++) {
        config.row_bytes[i] = i == 4 || i == 5 ? TILE_ROW_BYTES / 2 : TILE_ROW_BYTES;
        config.rows[i] = i == 6 || i == 7 ? TILE_ROWS / 2 : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
static inline void tiles_end(void) { __asm__ volatile("tilerelease"); }

/* What a load may read, as an operand: any memory from p on, or for clang, which needs a size, more than rows take. */
#if defined(__clang__)
#define TILE_MEMORY(p) "m"(*(const char(*)[1 << 20])(p))
#else
#define TILE_MEMORY(p) "m"(*(const char(*)[])(p))
#endif
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define tile_load(t, p, step) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((long)(step)), TILE_MEMORY(p))
/* The same for memory that is not read again soon. */
#define tile_stream(t, p, step) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t : : "r"(p), "r"((long)(step)), TILE_MEMORY(p))
#define tile_store(t, p, step) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((long)(step)) : "memory")
/* c += a b, where a has rows of 16 pairs of bf16, and b has columns of 16 pairs.  The AT&T order is b, a, c. */
#define tile_dot(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
/* The same for signed bytes with sums in int32: a has rows of up to 16 times 4 bytes, b has columns of them. */
#define tile_dot_bytes(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

#else

typedef union tile_data {
    unsigned char rows[TILE_ROWS][TILE_ROW_BYTES];
    uint32_t words[TILE_ROWS][16];
    float numbers[TILE_ROWS][16];
} tile_data;
static _Thread_local tile_data tiles[NUM_TILES];
static _Thread_local int rows_of_tile[NUM_TILES], bytes_of_row[NUM_TILES];

static inline void tiles_begin(int rows) {
    memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < NUM_TILES; i++) {
        rows_of_tile[i] = i <= LAST_OF_ROWS ? rows : TILE_ROWS;
        bytes_of_row[i] = TILE_ROW_BYTES;
    }
}
static inline void tiles_begin_bytes(void) {
    tiles_begin(TILE_ROWS);
    bytes_of_row[4] = bytes_of_row[5] = TILE_ROW_BYTES / 2;
    rows_of_tile[6] = rows_of_tile[7] = TILE_ROWS / 2;
}
static inline void tiles_end(void) { memset(tiles, 0xff, sizeof tiles); /* later use gives NaN */ }
static inline void tile_zero(int t) { memset(&tiles[t], 0, sizeof tiles[t]); }
static __attribute__((noinline)) void tile_load(int t, const void *p, long step) {
    for (int r = 0; r < rows_of_tile[t]; r++) memcpy(tiles[t].rows[r], (const char *)p + r * step, bytes_of_row[t]);
}
static inline void tile_stream(int t, const void *p, long step) { tile_load(t, p, step); }
static __attribute__((noinline)) void tile_store(int t, void *p, long step) {
    for (int r = 0; r < rows_of_tile[t]; r++) memcpy((char *)p + r * step, tiles[t].rows[r], bytes_of_row[t]);
}

static inline float tile_number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* Zero with the sign of x if x is subnormal, otherwise x. */
static inline float tile_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
/* a * b + c, rounded once; a and b are bf16, or a is 1.  The result is zero if it is subnormal after rounding with an
 * unbounded exponent; then the sum is exact in double. */
static inline float tile_fma(float a, float b, float c) {
    const float x = tile_flushed(a), y = tile_flushed(b), z = tile_flushed(c);
    const double sum = (double)x * y + z;
    return fabs(sum) < 0x1p-126 - 0x1p-151 ? copysignf(0.0f, (float)sum) : fmaf(x, y, z);
}
static __attribute__((noinline, unused)) void tile_dot(int c, int a, int b) {
    for (int m = 0; m < rows_of_tile[c]; m++)
        for (int n = 0; n < 16; n++) {
            float first = 0.0f, second = 0.0f;
            for (int k = 0; k < 16; k++) {
                const uint32_t x = tiles[a].words[m][k], y = tiles[b].words[k][n];
                first = tile_fma(tile_number(x << 16), tile_number(y << 16), first);
                second = tile_fma(tile_number(x & 0xffff0000u), tile_number(y & 0xffff0000u), second);
            }
            tiles[c].numbers[m][n] = tile_fma(1.0f, tile_fma(1.0f, first, second), tiles[c].numbers[m][n]);
        }
}
static __attribute__((noinline, unused)) void tile_dot_bytes(int c, int a, int b) {
    for (int m = 0; m < rows_of_tile[c]; m++)
        for (int n = 0; n < 16; n++) {
            int32_t sum = (int32_t)tiles[c].words[m][n];
            for (int i = 0; i < bytes_of_row[a]; i++)
                sum += (int8_t)tiles[a].rows[m][i] * (int8_t)tiles[b].rows[i / 4][4 * n + i % 4];
            tiles[c].words[m][n] = (uint32_t)sum;
        }
}
#endif
#endif
