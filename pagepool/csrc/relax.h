/* relax.h: the pause in a loop that waits for another thread. */
#ifndef PP_RELAX_H
#define PP_RELAX_H

/* Lets the other hardware thread of the core run, for a few cycles up to 0.1 us. */
static inline void pp_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
