/* workspace.c: memory for one call of decode, kept by the thread for its next call. */
#define _GNU_SOURCE
#include "workspace.h"

#include <pthread.h>
#include <stdlib.h>

enum { ALIGN = 64 };

static _Thread_local struct {
    void *memory; /* cached by the thread; in use while `lent` is set */
    size_t bytes;
    int lent;
} own;

static pthread_key_t ending;
static int has_ending;

static void free_at_end(void *memory) {
    own.memory = NULL;
    own.bytes = 0;
    free(memory);
}

static void make_ending(void) { has_ending = !pthread_key_create(&ending, free_at_end); }

void *pp_workspace_borrow(size_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    void *memory;
    if (!own.lent && bytes <= own.bytes) {
        own.lent = 1;
        return own.memory;
    }
    if (posix_memalign(&memory, ALIGN, bytes)) return NULL;
    pthread_once(&once, make_ending);
    /* Keep the memory only if it will be freed when the thread exits. */
    if (own.lent || bytes > PP_WORKSPACE_KEPT || !has_ending || pthread_setspecific(ending, memory)) return memory;
    free(own.memory);
    own.memory = memory;
    own.bytes = bytes;
    own.lent = 1;
    return memory;
}

void pp_workspace_return(void *memory) {
    if (memory == own.memory)
        own.lent = 0;
    else
        free(memory);
}
