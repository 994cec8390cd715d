/* pagepool/cpu.h: which instruction set the kernels use. */
#ifndef PAGEPOOL_CPU_H
#define PAGEPOOL_CPU_H

#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The name of the instruction set in use: "avx512_wide_bf16", "avx512_wide", "avx512_bf16", "avx512", "avx2",
 * "neon_dotprod", "neon" or "baseline"; bf16: with dot products of bf16; wide: for cores whose vector units are 512
 * bits wide, as measured in less than 0.1 ms; dotprod: with dot products of 8-bit integers.  Chosen once, at the first
 * call, as the best one that both the CPU and the system offer (CPUID and XCR0, on Arm the auxiliary vector), or as the
 * environment's PAGEPOOL_ISA names it; a name that this machine cannot run is ignored, and pp_isa_forced_unavailable()
 * is 1 then.  All have the same bits, but "baseline", whose multiply-adds round twice as the CPU has no fma. */
PP_API const char *pp_isa(void);
PP_API int pp_isa_forced_unavailable(void);

/* How often the kernels prefetch each line of K and V before they read it: "none", "once" or "twice".  "twice", unless
 * the environment's PAGEPOOL_PREFETCH names another one at the first call; a name that is none of the three is ignored,
 * and pp_prefetch_forced_unknown() is 1 then.  No bit depends on it. */
PP_API const char *pp_prefetch(void);
PP_API int pp_prefetch_forced_unknown(void);

/* The i-th instruction set, best first, that this build has and this machine can run; NULL past the last one. */
PP_API const char *pp_isa_available(int i);

#ifdef __cplusplus
}
#endif
#endif
