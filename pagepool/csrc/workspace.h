/* workspace.h: memory for one call of decode, kept by the thread for its next call.
 *
 * `free` returns memory of this size to the system, so each call would pay for new page faults.  A thread therefore
 * keeps at most PP_WORKSPACE_KEPT bytes, and frees them when it exits. */
#ifndef PP_WORKSPACE_H
#define PP_WORKSPACE_H

#include <stddef.h>

enum { PP_WORKSPACE_KEPT = 8 << 20 };

/* Returns `bytes` uninitialised bytes, aligned to 64, for the calling thread until it passes them to
 * pp_workspace_return.  Returns NULL if no memory is available.  A thread has one cached workspace; a second one is
 * allocated separately. */
void *pp_workspace_borrow(size_t bytes);
void pp_workspace_return(void *memory);

#endif
