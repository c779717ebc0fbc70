/* A disk that hangs, for tests: preloaded into a process, it makes every call that touches a path
 * with the part HANG_MARK wait as long as the file HANG_CONTROL exists (HANG_CONTROL.stuck then says
 * that one waits), and notes in HANG_LOG the calls that the process's first thread makes there.
 * Calls on open files are found by their path too.
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
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Raw calls: ours must not come back here. */
static void note(const char *call, const char *path) {
    const char *log = getenv("HANG_LOG");
    if (!log || syscall(SYS_gettid) != getpid()) return;
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%d %s %s\n", getpid(), call, path);
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file >= 0) {
        syscall(SYS_write, file, line, size < (int)sizeof line ? size : (int)sizeof line - 1);
        syscall(SYS_close, file);
    }
}

/* Whether a part of the path, between slashes, is the mark. */
static int has_part(const char *path, const char *mark) {
    size_t size = strlen(mark);
    for (const char *at = path; (at = strstr(at, mark)); at++)
        if ((at == path || at[-1] == '/') && (at[size] == '/' || !at[size])) return 1;
    return 0;
}

static void wait_for(const char *call, const char *path) {
    const char *mark = getenv("HANG_MARK"), *control = getenv("HANG_CONTROL");
    if (!mark || !control || !path || !has_part(path, mark)) return;
    int before = errno;
    note(call, path);
    struct timespec pause = {0, 2000000};
    if (syscall(SYS_faccessat, AT_FDCWD, control, F_OK) == 0) {
        char stuck[PATH_MAX];
        snprintf(stuck, sizeof stuck, "%s.stuck", control);
        syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, stuck, O_WRONLY | O_CREAT, 0600));
    }
    while (syscall(SYS_faccessat, AT_FDCWD, control, F_OK) == 0) nanosleep(&pause, NULL);
    errno = before;
}

static void wait_for_file(const char *call, int file) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    long size = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
    if (size <= 0) return;
    path[size] = 0;
    wait_for(call, path);
}

static void wait_for_at(const char *call, int folder, const char *path) {
    wait_for(call, path);
    if (path && path[0] != '/' && folder != AT_FDCWD) wait_for_file(call, folder);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        REAL(name); wait_for(#name, path); return real(path, flags, mode); }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        REAL(name); wait_for_at(#name, folder, path); return real(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define PATH1(type, name) \
    type name(const char *path) { REAL(name); wait_for(#name, path); return real(path); }
#define PATH2(type, name, second) \
    type name(const char *path, second more) { \
        REAL(name); wait_for(#name, path); return real(path, more); }
PATH1(int, unlink) PATH1(int, rmdir) PATH1(int, remove) PATH1(DIR *, opendir)
PATH2(int, mkdir, mode_t) PATH2(int, creat, mode_t) PATH2(int, access, int) PATH2(int, chmod, mode_t)
PATH2(int, truncate, off_t) PATH2(int, statvfs, struct statvfs *) PATH2(int, symlink, const char *)
PATH2(int, stat, struct stat *) PATH2(int, lstat, struct stat *)
PATH2(int, stat64, struct stat64 *) PATH2(int, lstat64, struct stat64 *)

#define STATAT(name, kind) \
    int name(int folder, const char *path, struct kind *found, int flags) { \
        REAL(name); wait_for_at(#name, folder, path); return real(folder, path, found, flags); }
STATAT(fstatat, stat) STATAT(fstatat64, stat64)

#define FSTAT(name, kind) \
    int name(int file, struct kind *found) { \
        REAL(name); wait_for_file(#name, file); return real(file, found); }
FSTAT(fstat, stat) FSTAT(fstat64, stat64)

int rename(const char *from, const char *to) {
    REAL(rename); wait_for("rename", from); wait_for("rename", to); return real(from, to);
}
int link(const char *from, const char *to) {
    REAL(link); wait_for("link", from); wait_for("link", to); return real(from, to);
}
int renameat(int folder, const char *from, int into, const char *to) {
    REAL(renameat); wait_for_at("renameat", folder, from); wait_for_at("renameat", into, to);
    return real(folder, from, into, to);
}
int renameat2(int folder, const char *from, int into, const char *to, unsigned flags) {
    REAL(renameat2); wait_for_at("renameat2", folder, from); wait_for_at("renameat2", into, to);
    return real(folder, from, into, to, flags);
}
int linkat(int folder, const char *from, int into, const char *to, int flags) {
    REAL(linkat); wait_for_at("linkat", folder, from); wait_for_at("linkat", into, to);
    return real(folder, from, into, to, flags);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat); wait_for_at("unlinkat", folder, path); return real(folder, path, flags);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat); wait_for_at("mkdirat", folder, path); return real(folder, path, mode);
}
int faccessat(int folder, const char *path, int mode, int flags) {
    REAL(faccessat); wait_for_at("faccessat", folder, path); return real(folder, path, mode, flags);
}
int fchmodat(int folder, const char *path, mode_t mode, int flags) {
    REAL(fchmodat); wait_for_at("fchmodat", folder, path); return real(folder, path, mode, flags);
}
ssize_t readlink(const char *path, char *into, size_t size) {
    REAL(readlink); wait_for("readlink", path); return real(path, into, size);
}
int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(utimensat); wait_for_at("utimensat", folder, path); return real(folder, path, times, flags);
}
DIR *fdopendir(int file) {
    REAL(fdopendir); wait_for_file("fdopendir", file); return real(file);
}
ssize_t write(int file, const void *content, size_t size) {
    REAL(write); wait_for_file("write", file); return real(file, content, size);
}
ssize_t read(int file, void *content, size_t size) {
    REAL(read); wait_for_file("read", file); return real(file, content, size);
}
ssize_t writev(int file, const struct iovec *pieces, int count) {
    REAL(writev); wait_for_file("writev", file); return real(file, pieces, count);
}
int fsync(int file) { REAL(fsync); wait_for_file("fsync", file); return real(file); }
int fdatasync(int file) { REAL(fdatasync); wait_for_file("fdatasync", file); return real(file); }
int fchmod(int file, mode_t mode) {
    REAL(fchmod); wait_for_file("fchmod", file); return real(file, mode);
}
