/* float_mode.h: sets IEEE 754 rounding and subnormals, whatever modes the calling thread has chosen.
 *
 * Each thread has its own modes. fesetround changes them, and so does a library compiled with -ffast-math: the thread
 * that loads it flushes subnormals from then on.  A worker has the modes of the thread that started it.  Code that
 * computes must therefore enter the default modes first and restore the old modes at the end.  Otherwise the bits of a
 * result would depend on the thread.
 *
 * The compiler is not aware of the modes and may move arithmetic out of the region.  The code inside must be in
 * functions that are not inlined, as kernels are. */
#ifndef PP_FLOAT_MODE_H
#define PP_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

/* Round to nearest, no flushing, no traps.  The mask excludes the lower six bits, which are status flags. */
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

/* Returns the value to pass to pp_modes_leave.  Reading the modes takes a few cycles, writing them takes many. */
static inline uint64_t pp_modes_enter(void) {
    const uint64_t before = pp_modes_read();
    if ((before & (uint64_t)PP_MODES) != PP_MODES_DEFAULT) pp_modes_write(PP_MODES_DEFAULT);
    return before;
}
static inline void pp_modes_leave(uint64_t before) {
    if ((before & (uint64_t)PP_MODES) != PP_MODES_DEFAULT) pp_modes_write(before);
}

#endif
