/* pagepool/version.h: the version of this set of headers. */
#ifndef PAGEPOOL_VERSION_H
#define PAGEPOOL_VERSION_H

/* Raised whenever a struct or a function below changes shape.  A program compiled against one ABI version must
 * link a library of the same: compare PP_ABI_VERSION with pp_abi_version(). */
#define PP_ABI_VERSION 4

#if defined(__GNUC__)
#define PP_API __attribute__((visibility("default")))
#else
#define PP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The ABI version the library was built with. */
PP_API int pp_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
