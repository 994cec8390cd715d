/* int_parts.h: queries in parts of 8 bits, for the instruction sets that multiply bytes (simd_vnni.h, simd_sdot.h). */
#ifndef PP_INT_PARTS_H
#define PP_INT_PARTS_H

#include <stdint.h>
#include <string.h>

/* Splits four signed 16-bit numbers of a query into parts. */
static inline void ints_of_query(const int32_t *q, float *words) {
    int8_t parts[2][4];
    for (int i = 0; i < 4; i++) {
        parts[1][i] = (int8_t)q[i];
        parts[0][i] = (int8_t)((q[i] - parts[1][i]) / 256);
    }
    memcpy(words, parts, sizeof parts);
}

#endif
