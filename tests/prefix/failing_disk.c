/* failing_disk.c: a preloaded library that ends the process, or fails, at a chosen change of a file.
 *
 * disk_countdown = n: the n-th change from now on is the chosen one.  0: none is.
 * disk_errno = 0: half of the chosen write is done, and the process is killed.
 * disk_errno = e: the chosen change and all later ones fail with e, until disk_countdown is set to 0.
 * disk_changes counts the changes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <unistd.h>

long disk_countdown, disk_errno, disk_changes;

/* Returns 1 at the chosen change; after it too, if changes fail. */
static int is_chosen(void) {
    disk_changes++;
    if (disk_countdown <= 0) return 0;
    if (disk_countdown > 1) {
        disk_countdown--;
        return 0;
    }
    return 1;
}

static int fail(void) {
    if (!disk_errno) kill(getpid(), SIGKILL);
    errno = (int)disk_errno;
    return -1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t offset) {
    static __typeof__(&pwrite64) next;
    if (!next) next = NEXT(pwrite64);
    if (!is_chosen()) return next(file, bytes, size, offset);
    if (!disk_errno) next(file, bytes, size / 2, offset);
    return fail();
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t offset) { return pwrite64(file, bytes, size, offset); }

#define CHANGE(name, parameters, arguments)     \
    int name parameters {                       \
        static __typeof__(&name) next;          \
        if (!next) next = NEXT(name);           \
        return is_chosen() ? fail() : next arguments; \
    }

CHANGE(ftruncate, (int file, off_t size), (file, size))
CHANGE(ftruncate64, (int file, off64_t size), (file, size))
CHANGE(fsync, (int file), (file))
CHANGE(fdatasync, (int file), (file))
CHANGE(unlink, (const char *path), (path))
CHANGE(fallocate, (int file, int mode, off_t offset, off_t size), (file, mode, offset, size))
CHANGE(fallocate64, (int file, int mode, off64_t offset, off64_t size), (file, mode, offset, size))
CHANGE(posix_fallocate, (int file, off_t offset, off_t size), (file, offset, size))
