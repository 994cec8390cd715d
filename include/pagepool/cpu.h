/* pagepool/cpu.h: the instruction set of the kernels. */
#ifndef PAGEPOOL_CPU_H
#define PAGEPOOL_CPU_H

#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Name of the instruction set in use: "amx", "avx512_wide", "avx512", "avx2", "neon_dotprod", "neon" or "baseline".
 *
 *   amx       multiplies tiles of bf16; only if the operating system lets the process use them
 *   wide      for cores with 512-bit vector units, detected by a measurement of less than 0.1 ms
 *   dotprod   has dot products of 8-bit integers
 *
 * The first call chooses it: the best one that both the CPU and the operating system support (CPUID and XCR0, on Arm
 * the auxiliary vector), or the one that the environment variable PAGEPOOL_ISA names.  A name that this machine cannot
 * run is ignored, and pp_isa_forced_unavailable() returns 1.  All give the same bits, except "baseline": without fma
 * its multiply-adds round twice. */
PP_API const char *pp_isa(void);
PP_API int pp_isa_forced_unavailable(void);

/* Returns 1 if the CPU has AMX and the operating system does not let the process use it, because the alternate signal
 * stack of a thread is too small for the state of tiles.  Another instruction set is used then. */
PP_API int pp_tiles_refused(void);

/* Name of the i-th instruction set, best first, among those that the build contains and the machine can run; NULL after
 * the last one. */
PP_API const char *pp_isa_available(int i);

#ifdef __cplusplus
}
#endif
#endif
