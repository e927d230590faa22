/* Loaded in front of the C library: makes the n-th call of one kind fail, fall short, or stop or kill the process.
 * Only calls on files whose path contains the pattern count. fault_set() arms it; each fault happens once, but for
 * "short", which halves every call. "stop" waits for SIGCONT, which shells and terminals send as well; "gate" makes
 * the file ../waiting and waits until it is gone, whatever signals come. Of calls that give names, "lost" loses the
 * reply: the call does its work and fails; "lie": it reports success and does nothing. "plain" at the end of either, such
 * as "lost plain": names cannot be swapped. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char wanted[32], kind[16], pattern[256];
static int countdown = -1;

void fault_set(const char *call, int at, const char *what, const char *path) {
    snprintf(wanted, sizeof wanted, "%s", call);
    snprintf(kind, sizeof kind, "%s", what);
    snprintf(pattern, sizeof pattern, "%s", path);
    countdown = at;
}

static int hit(const char *call, const char *path) {
    if (countdown < 0 || strcmp(call, wanted) || !strstr(path, pattern)) return 0;
    if (!strcmp(kind, "short")) return 1;
    return __sync_fetch_and_sub(&countdown, 1) == 0;
}

static int hit_fd(const char *call, int fd) {
    char link[64], path[4096];
    if (countdown < 0 || strcmp(call, wanted)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hit(call, path);
}

/* 1: the call must fail with errno set; 0: it goes on. */
static int happen(void) {
    if (!strcmp(kind, "kill")) raise(SIGKILL);
    if (!strcmp(kind, "stop")) { raise(SIGSTOP); return 0; }
    if (!strcmp(kind, "gate")) {
        close(creat("../waiting", 0600));
        while (!access("../waiting", F_OK)) usleep(1000);
        return 0;
    }
    if (!strcmp(kind, "short")) return 0;
    errno = !strcmp(kind, "ENOSPC") ? ENOSPC : !strcmp(kind, "EDQUOT") ? EDQUOT : EIO;
    return 1;
}

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

static ssize_t put(const char *name, int fd, const void *data, size_t n, off_t at) {
    if (hit_fd("pwrite", fd)) {
        if (happen()) return -1;
        if (!strcmp(kind, "short") && n > 1) n = n / 2 + 1;
    }
    return NEXT(ssize_t, name, int, const void *, size_t, off_t)(fd, data, n, at);
}
ssize_t pwrite(int fd, const void *d, size_t n, off_t at) { return put("pwrite", fd, d, n, at); }
ssize_t pwrite64(int fd, const void *d, size_t n, off_t at) { return put("pwrite64", fd, d, n, at); }

static ssize_t get(const char *name, int fd, const struct iovec *v, int n, off_t at) {
    struct iovec less = v[0];
    if (hit_fd("preadv", fd)) {
        if (happen()) return -1;
        if (!strcmp(kind, "short") && n == 1 && less.iov_len > 1) { less.iov_len = less.iov_len / 2 + 1; v = &less; }
    }
    return NEXT(ssize_t, name, int, const struct iovec *, int, off_t)(fd, v, n, at);
}
static ssize_t get2(const char *name, int fd, const struct iovec *v, int n, off_t at, int flags) {
    struct iovec less = v[0];
    if (hit_fd("preadv", fd)) {
        if (happen()) return -1;
        if (!strcmp(kind, "short") && n == 1 && less.iov_len > 1) { less.iov_len = less.iov_len / 2 + 1; v = &less; }
    }
    return NEXT(ssize_t, name, int, const struct iovec *, int, off_t, int)(fd, v, n, at, flags);
}
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int f) { return get2("preadv2", fd, v, n, at, f); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off_t at, int f) {
    return get2("preadv64v2", fd, v, n, at, f);
}
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { return get("preadv", fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off_t at) { return get("preadv64", fd, v, n, at); }

ssize_t read(int fd, void *to, size_t n) {
    return hit_fd("read", fd) && happen() ? -1 : NEXT(ssize_t, "read", int, void *, size_t)(fd, to, n);
}

static ssize_t fetch(const char *name, int fd, void *to, size_t n, off_t at) {
    return hit_fd("pread", fd) && happen() ? -1 : NEXT(ssize_t, name, int, void *, size_t, off_t)(fd, to, n, at);
}
ssize_t pread(int fd, void *to, size_t n, off_t at) { return fetch("pread", fd, to, n, at); }
ssize_t pread64(int fd, void *to, size_t n, off_t at) { return fetch("pread64", fd, to, n, at); }

int fsync(int fd) { return hit_fd("fsync", fd) && happen() ? -1 : NEXT(int, "fsync", int)(fd); }

static int cut(const char *name, int fd, off_t n) {
    return hit_fd("ftruncate", fd) && happen() ? -1 : NEXT(int, name, int, off_t)(fd, n);
}
int ftruncate(int fd, off_t n) { return cut("ftruncate", fd, n); }
int ftruncate64(int fd, off_t n) { return cut("ftruncate64", fd, n); }

static int reserve(const char *name, int fd, off_t at, off_t n) {
    return hit_fd("fallocate", fd) && happen() ? errno : NEXT(int, name, int, off_t, off_t)(fd, at, n);
}
int posix_fallocate(int fd, off_t at, off_t n) { return reserve("posix_fallocate", fd, at, n); }
int posix_fallocate64(int fd, off_t at, off_t n) { return reserve("posix_fallocate64", fd, at, n); }

/* What becomes of a call that gives a name: `act` does its work. */
#define NAMED(a, act) \
    if (hit("name", a)) { \
        if (!strncmp(kind, "lie", 3)) return 0; \
        if (!strncmp(kind, "lost", 4)) { (void)!(act); errno = EIO; return -1; } \
        if (happen()) return -1; \
    } \
    return act

int rename(const char *a, const char *b) {
    NAMED(a, NEXT(int, "rename", const char *, const char *)(a, b));
}
int link(const char *a, const char *b) {
    NAMED(a, NEXT(int, "link", const char *, const char *)(a, b));
}
int linkat(int p, const char *a, int q, const char *b, int f) {
    NAMED(a, NEXT(int, "linkat", int, const char *, int, const char *, int)(p, a, q, b, f));
}
int renameat2(int p, const char *a, int q, const char *b, unsigned f) {
    if (strstr(kind, "plain") && strstr(a, pattern)) { errno = EINVAL; return -1; }
    NAMED(a, NEXT(int, "renameat2", int, const char *, int, const char *, unsigned)(p, a, q, b, f));
}
int unlink(const char *a) {
    return hit("unlink", a) && happen() ? -1 : NEXT(int, "unlink", const char *)(a);
}
