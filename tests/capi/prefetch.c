/* prefetch.c: the way to prefetch, and the kernels for AVX-512, are a function of what CPUID says: of CPUs as they name
 * themselves. */
#include <stdio.h>

#include "pagepool/cpu.h"

enum { NONE, L1, L2, REPEAT, PAST };
int pp_prefetch_mode_of(const char *maker, unsigned signature); /* internal */
int pp_prefetch_mode(void);
int pp_has_wide_units(const char *maker, unsigned signature); /* internal */

int main(void) {
    static const struct {
        const char *maker;
        unsigned signature;
        int mode, wide;
    } cpus[] = {
        {"GenuineIntel", 0x00050654, REPEAT, 1}, /* Skylake-SP */
        {"GenuineIntel", 0x000606a6, REPEAT, 1}, /* Ice Lake-SP */
        {"GenuineIntel", 0x000806f8, REPEAT, 1}, /* Sapphire Rapids */
        {"GenuineIntel", 0x000c06f2, REPEAT, 1}, /* Emerald Rapids */
        {"AuthenticAMD", 0x00800f12, L1, 0}, /* Naples, Zen 1 */
        {"AuthenticAMD", 0x00830f10, L1, 0}, /* Rome, Zen 2 */
        {"AuthenticAMD", 0x00a00f11, REPEAT, 0}, /* Milan, Zen 3 */
        {"AuthenticAMD", 0x00a10f11, REPEAT, 0}, /* Genoa, Zen 4 */
        {"AuthenticAMD", 0x00aa0f02, REPEAT, 0}, /* Bergamo, Zen 4c */
        {"AuthenticAMD", 0x00b00f21, PAST, 1}, /* Turin, Zen 5 */
        {"AuthenticAMD", 0x00b40f40, PAST, 1}, /* Granite Ridge, Zen 5 */
        {"AuthenticAMD", 0x00c00f00, PAST, 1}, /* what follows it */
        {"HygonGenuine", 0x00900f02, L1, 0},
        {"CentaurHauls", 0x00a10f11, L1, 0}, /* Zen 4's numbers of another maker */
        {"", 0, L1, 0},
    };
    for (unsigned i = 0; i < sizeof cpus / sizeof cpus[0]; i++)
        if (pp_prefetch_mode_of(cpus[i].maker, cpus[i].signature) != cpus[i].mode ||
            pp_has_wide_units(cpus[i].maker, cpus[i].signature) != cpus[i].wide) {
            fprintf(stderr, "%s %08x\n", cpus[i].maker, cpus[i].signature);
            return 1;
        }
    const int here = pp_prefetch_mode();
    if (here == NONE || here > PAST || here != pp_prefetch_mode()) return 2;
    puts("ok");
    return 0;
}
