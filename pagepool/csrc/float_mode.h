/* float_mode.h: rounding and subnormals as IEEE 754 has them, whatever the calling thread has chosen.
 *
 * Each thread has modes of its own: fesetround changes them, and so does a library compiled with -ffast-math, which
 * makes the thread that loads it flush subnormals from then on.  Workers have those of the thread that started them.
 * So whatever computes enters the default modes first and leaves them in the end, or bits would depend on who ran what.
 *
 * A compiler knows nothing of it and may move arithmetic out: what lies between must be in functions that are not
 * inlined, as kernels are. */
#ifndef PP_FLOAT_MODE_H
#define PP_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

/* Rounds to nearest, flushes nothing, traps nothing; the six bits below are what has happened. */
enum { PP_MODES = 0xffc0, PP_MODES_DEFAULT = 0x1f80 };
static inline uint64_t pp_modes_read(void) { return _mm_getcsr(); }
static inline void pp_modes_write(uint64_t modes) { _mm_setcsr((unsigned)modes); }

#elif defined(__aarch64__)

enum { PP_MODES = -1, PP_MODES_DEFAULT = 0 };
static inline uint64_t pp_modes_read(void) {
    uint64_t modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
}
static inline void pp_modes_write(uint64_t modes) { __asm__ volatile("msr fpcr, %0" : : "r"(modes) : "memory"); }

#else

enum { PP_MODES = 0, PP_MODES_DEFAULT = 0 }; /* unknown: left as they are */
static inline uint64_t pp_modes_read(void) { return 0; }
static inline void pp_modes_write(uint64_t modes) { (void)modes; }

#endif

/* Returns what pp_modes_leave wants.  Reading the modes takes a few cycles, writing them many. */
static inline uint64_t pp_modes_enter(void) {
    const uint64_t before = pp_modes_read();
    if ((before & (uint64_t)PP_MODES) != PP_MODES_DEFAULT) pp_modes_write(PP_MODES_DEFAULT);
    return before;
}
static inline void pp_modes_leave(uint64_t before) {
    if ((before & (uint64_t)PP_MODES) != PP_MODES_DEFAULT) pp_modes_write(before);
}

#endif
