/* workspace.c: the scratch that a thread keeps between two calls of decode. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

/* Declared in pagepool/csrc/workspace.h, which is not installed. */
void *pp_workspace_borrow(size_t bytes);
void pp_workspace_return(void *memory);
enum { KEPT = 8 << 20 };

static void *of_a_thread(void *other) {
    unsigned char *first = pp_workspace_borrow(1000);
    CHECK(first && first != other && (uintptr_t)first % 64 == 0);
    memset(first, 1, 1000);

    /* While the workspace is in use, a second caller gets its own memory. */
    unsigned char *second = pp_workspace_borrow(100), *third = pp_workspace_borrow(100000);
    CHECK(second && third && (second + 100 <= first || first + 1000 <= second));
    memset(second, 2, 100);
    memset(third, 3, 100000);
    pp_workspace_return(second);
    pp_workspace_return(third);
    CHECK(first[0] == 1 && first[999] == 1);
    pp_workspace_return(first);

    /* An equal or smaller request reuses it.  A larger one replaces it and is kept. */
    CHECK(pp_workspace_borrow(1000) == first);
    pp_workspace_return(first);
    CHECK(pp_workspace_borrow(1) == first);
    pp_workspace_return(first);
    unsigned char *larger = pp_workspace_borrow(KEPT);
    CHECK(larger);
    memset(larger, 4, KEPT);
    pp_workspace_return(larger);
    CHECK(pp_workspace_borrow(1000) == larger);
    pp_workspace_return(larger);

    /* A request that is too large to keep, or that fails, leaves the kept workspace unchanged. */
    unsigned char *huge = pp_workspace_borrow((size_t)KEPT + 1);
    CHECK(huge && huge != larger);
    huge[KEPT] = 5;
    pp_workspace_return(huge);
    if (!other) CHECK(pp_workspace_borrow(SIZE_MAX / 2) == NULL);
    CHECK(pp_workspace_borrow(KEPT) == larger);
    pp_workspace_return(larger);
    return NULL;
}

int main(void) {
    unsigned char *mine = pp_workspace_borrow(1000);
    for (int i = 0; i < 50; i++) {
        pthread_t threads[4];
        for (int t = 0; t < 4; t++)
            CHECK(pthread_create(&threads[t], NULL, of_a_thread, mine) == 0);
        for (int t = 0; t < 4; t++) CHECK(pthread_join(threads[t], NULL) == 0);
    }
    pp_workspace_return(mine);
    of_a_thread(NULL);
    puts("ok");
    return 0;
}
