/* prefetch.c: PAGEPOOL_PREFETCH says how often lines are prefetched, and what CPUID says which kernels for AVX-512
 * suit. Arguments: the value of PAGEPOOL_PREFETCH, or none. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagepool/cpu.h"

int pp_has_wide_units(const char *maker, unsigned signature); /* internal */

static const struct {
    const char *maker;
    unsigned signature;
    int wide;
} CPUS[] = {
    {"GenuineIntel", 0x00050654, 1}, /* Skylake-SP */
    {"GenuineIntel", 0x000606a6, 1}, /* Ice Lake-SP */
    {"GenuineIntel", 0x000806f8, 1}, /* Sapphire Rapids */
    {"GenuineIntel", 0x000c06f2, 1}, /* Emerald Rapids */
    {"AuthenticAMD", 0x00800f12, 0}, /* Naples, Zen 1 */
    {"AuthenticAMD", 0x00830f10, 0}, /* Rome, Zen 2 */
    {"AuthenticAMD", 0x00a00f11, 0}, /* Milan, Zen 3 */
    {"AuthenticAMD", 0x00a10f11, 0}, /* Genoa, Zen 4 */
    {"AuthenticAMD", 0x00aa0f02, 0}, /* Bergamo, Zen 4c */
    {"AuthenticAMD", 0x00b00f21, 1}, /* Turin, Zen 5 */
    {"AuthenticAMD", 0x00b40f40, 1}, /* Granite Ridge, Zen 5 */
    {"AuthenticAMD", 0x00c00f00, 1}, /* what follows it */
    {"HygonGenuine", 0x00900f02, 0},
    {"CentaurHauls", 0x00a10f11, 0}, /* Zen 4's numbers of another maker */
    {"", 0, 0},
};

int main(int argc, char **argv) {
    const char *asked = argc > 1 ? argv[1] : "";
    const int known = !strcmp(asked, "none") || !strcmp(asked, "once") || !strcmp(asked, "twice");
    if (argc > 1 ? setenv("PAGEPOOL_PREFETCH", asked, 1) : unsetenv("PAGEPOOL_PREFETCH")) return 1;
    for (unsigned i = 0; i < sizeof CPUS / sizeof CPUS[0]; i++)
        if (pp_has_wide_units(CPUS[i].maker, CPUS[i].signature) != CPUS[i].wide) {
            fprintf(stderr, "%s %08x\n", CPUS[i].maker, CPUS[i].signature);
            return 1;
        }
    if (pp_prefetch_forced_unknown() != (*asked && !known)) return 2;
    if (strcmp(pp_prefetch(), known ? asked : "twice")) return 3;
    if (setenv("PAGEPOOL_PREFETCH", "none", 1)) return 1;
    if (strcmp(pp_prefetch(), known ? asked : "twice")) return 4; /* it is read once */
    printf("ok %s\n", pp_prefetch());
    return 0;
}
