/* pagepool/version.h: the ABI version of the headers. */
#ifndef PAGEPOOL_VERSION_H
#define PAGEPOOL_VERSION_H

/* Increases whenever a public struct or function signature changes.  A program must link a library with the ABI version
 * that it was compiled against: compare PP_ABI_VERSION with pp_abi_version(). */
#define PP_ABI_VERSION 5

#if defined(__GNUC__)
#define PP_API __attribute__((visibility("default")))
#else
#define PP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The ABI version of the library. */
PP_API int pp_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
