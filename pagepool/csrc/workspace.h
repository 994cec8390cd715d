/* workspace.h: memory for one call of decode, kept by the thread for its next call.
 *
 * An allocator gives memory of this size back to the system when it is freed, so that each call would be charged with
 * faulting in its pages again.  A thread keeps at most PP_WORKSPACE_KEPT bytes, and frees them when it ends. */
#ifndef PP_WORKSPACE_H
#define PP_WORKSPACE_H

#include <stddef.h>

enum { PP_WORKSPACE_KEPT = 8 << 20 };

/* `bytes` bytes, aligned to 64, of no defined content, for the calling thread alone until it hands them to
 * pp_workspace_return; NULL where there is no memory.  One at a time: a second one is simply allocated. */
void *pp_workspace_borrow(size_t bytes);
void pp_workspace_return(void *memory);

#endif
