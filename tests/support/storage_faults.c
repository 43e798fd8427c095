/* Interposed between a process and its file system (LD_PRELOAD): calls on chosen paths fail with a chosen error.
 *
 * FAULT_CALL   the call that fails: rename, open, fsync, write, unlink, list (a directory) or lock (a record's, by fcntl)
 * FAULT_PATH   what the path contains
 * FAULT_ERRNO  the number of the error
 * FAULT_AFTER  how often it still does not fail; absent: never
 * FAULT_TIMES  how often it still fails after that; absent: always
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* Take one from the number in this variable; 0 if it is absent or used up. */
static int taken_from(const char *name) {
    const char *number = getenv(name);
    if (!number || atoi(number) <= 0) return 0;
    char left[16];
    snprintf(left, sizeof left, "%d", atoi(number) - 1);
    setenv(name, left, 1);
    return 1;
}

static int fails(const char *call, const char *path) {
    const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH");
    if (!wanted || !part || strcmp(wanted, call) || !path || !strstr(path, part)) return 0;
    if (taken_from("FAULT_AFTER")) return 0;
    if (getenv("FAULT_TIMES") && !taken_from("FAULT_TIMES")) return 0;
    errno = atoi(getenv("FAULT_ERRNO"));
    return 1;
}

static int fails_at(const char *call, int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define NEXT(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

int rename(const char *from, const char *to) {
    return fails("rename", to) ? -1 : NEXT(int, "rename", const char *, const char *)(from, to);
}

int unlink(const char *path) { return fails("unlink", path) ? -1 : NEXT(int, "unlink", const char *)(path); }

DIR *opendir(const char *path) { return fails("list", path) ? NULL : NEXT(DIR *, "opendir", const char *)(path); }

int fsync(int descriptor) { return fails_at("fsync", descriptor) ? -1 : NEXT(int, "fsync", int)(descriptor); }

ssize_t write(int descriptor, const void *data, size_t size) {
    return fails_at("write", descriptor) ? -1 : NEXT(ssize_t, "write", int, const void *, size_t)(descriptor, data, size);
}

#define OPEN(name)                                                                                  \
    int name(const char *path, int flags, ...) {                                                    \
        va_list rest;                                                                               \
        va_start(rest, flags);                                                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                     \
        va_end(rest);                                                                               \
        return fails("open", path) ? -1 : NEXT(int, #name, const char *, int, ...)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define FCNTL(name)                                                                                                \
    int name(int descriptor, int command, ...) {                                                                   \
        va_list rest;                                                                                              \
        va_start(rest, command);                                                                                   \
        void *argument = va_arg(rest, void *);                                                                     \
        va_end(rest);                                                                                              \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_GETLK;                               \
        return locks && fails_at("lock", descriptor) ? -1 : NEXT(int, #name, int, int, ...)(descriptor, command, argument); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
