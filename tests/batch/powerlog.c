/* Logs what a process does to the files below POWERLOG_ROOT into POWERLOG_FILE, for powerloss.py.
 *
 * Loaded by LD_PRELOAD. A record is written while a lock is held under which the call was made, so
 * that the records of all processes are in the order of their calls. What the log cannot tell
 * (fallocate, shared writable mappings) ends the process. SQLite's -shm files need not outlive a
 * loss of power, and are left out. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FDS 65536
#define WORDS (PATH_MAX + 16)

struct record {
    uint64_t op, file, place;
    uint32_t first, second; /* lengths of what follows */
};

static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static unsigned char tracked[MOST_FDS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;


static void die(const char *why) {
    dprintf(2, "powerlog: %s\n", why);
    abort();
}

static ssize_t raw_write(int fd, const void *data, size_t size) {
    return syscall(SYS_write, fd, data, size);
}

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("POWERLOG_ROOT"), *file = getenv("POWERLOG_FILE");
    if (folder == NULL || file == NULL || realpath(folder, root) == NULL) return;
    root_length = strlen(root);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) die("the log cannot be opened");
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900); /* out of the way of numbers that programs expect */
    syscall(SYS_close, fd);
}

static void after_fork(void) { pthread_mutex_init(&mutex, NULL); }
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork);
}

static void lock(void) {
    pthread_mutex_lock(&mutex);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    while (fcntl(log_fd, F_SETLKW, &whole) < 0)
        if (errno != EINTR) die("the log cannot be locked");
}

static void unlock(void) {
    int before = errno;
    struct flock whole = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    fcntl(log_fd, F_SETLK, &whole);
    pthread_mutex_unlock(&mutex);
    errno = before;
}

static void put(char op, uint64_t file, uint64_t place, const void *first, size_t first_size,
                const void *second, size_t second_size) {
    int before = errno;
    struct record head = {(uint64_t)op, file, place, (uint32_t)first_size, (uint32_t)second_size};
    size_t size = sizeof head + first_size + second_size, done = 0;
    char *all = malloc(size);
    memcpy(all, &head, sizeof head);
    if (first_size) memcpy(all + sizeof head, first, first_size);
    if (second_size) memcpy(all + sizeof head + first_size, second, second_size);
    while (done < size) {
        ssize_t written = raw_write(log_fd, all + done, size - done);
        if (written < 0 && errno != EINTR) die("the log cannot be written");
        if (written > 0) done += (size_t)written;
    }
    free(all);
    errno = before;
}

static void put_path(char op, uint64_t file, uint64_t place, const char *path) {
    put(op, file, place, path, strlen(path), NULL, 0);
}

/* The absolute path of a name, whose last part need not be there; 0 if it is not below the root. */
static int below(int folder, const char *name, char *path) {
    if (log_fd < 0 || name == NULL) return 0;
    char joined[WORDS], real[PATH_MAX];
    if (name[0] == '/') {
        snprintf(joined, sizeof joined, "%s", name);
    } else if (folder == AT_FDCWD) {
        if (getcwd(real, sizeof real) == NULL) return 0;
        if (snprintf(joined, sizeof joined, "%s/%s", real, name) >= WORDS) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, real, sizeof real - 1);
        if (size < 0) return 0;
        real[size] = 0;
        if (snprintf(joined, sizeof joined, "%s/%s", real, name) >= WORDS) return 0;
    }
    if (strncmp(joined, root, root_length) || (joined[root_length] && joined[root_length] != '/'))
        return 0;
    size_t length = strlen(joined);
    if (length > 4 && !strcmp(joined + length - 4, "-shm")) return 0;
    strcpy(path, joined);
    return 1;
}

static int is_tracked(int fd) { return fd >= 0 && fd < MOST_FDS && tracked[fd]; }

static uint64_t number_of(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

/* -- opening and closing ------------------------------------------------------------------- */

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[WORDS];
    int before = errno;
    if (!below(folder, name, path)) {
        errno = before;
        return (int)syscall(SYS_openat, folder, name, flags, mode);
    }
    lock();
    int there = syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
    errno = before;
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    if (fd >= 0) {
        if (fd >= MOST_FDS) die("too many descriptors");
        tracked[fd] = 1;
        int created = !there && (flags & O_CREAT), cut = there && (flags & O_TRUNC);
        if (!(flags & O_DIRECTORY))
            put_path('O', number_of(fd), (uint64_t)(created | cut << 1), path);
    }
    unlock();
    return fd;
}

static mode_t mode_in(int flags, va_list more) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
}

#define OPEN(name, words, folder)                                    \
    int name words {                                                 \
        va_list more;                                                \
        va_start(more, flags);                                       \
        mode_t mode = mode_in(flags, more);                          \
        va_end(more);                                                \
        return opened(folder, path, flags, mode);                    \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), at)
OPEN(openat64, (int at, const char *path, int flags, ...), at)
int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }
int __openat64_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }

int close(int fd) {
    if (fd == log_fd && fd >= 0) return 0; /* of a program that closes all it does not know */
    if (is_tracked(fd)) tracked[fd] = 0;
    return (int)syscall(SYS_close, fd);
}

/* -- contents ------------------------------------------------------------------------------ */

ssize_t write(int fd, const void *data, size_t size) {
    if (!is_tracked(fd)) return raw_write(fd, data, size);
    lock();
    ssize_t done = raw_write(fd, data, size);
    if (done > 0) {
        off_t end = lseek(fd, 0, SEEK_CUR);
        put('W', number_of(fd), (uint64_t)(end - done), data, (size_t)done, NULL, 0);
    }
    unlock();
    return done;
}

static ssize_t placed(int fd, const void *data, size_t size, off_t place) {
    if (!is_tracked(fd)) return syscall(SYS_pwrite64, fd, data, size, place);
    lock();
    ssize_t done = syscall(SYS_pwrite64, fd, data, size, place);
    if (done > 0) put('W', number_of(fd), (uint64_t)place, data, (size_t)done, NULL, 0);
    unlock();
    return done;
}
ssize_t pwrite(int fd, const void *d, size_t n, off_t at) { return placed(fd, d, n, at); }
ssize_t pwrite64(int fd, const void *d, size_t n, off_t at) { return placed(fd, d, n, at); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (is_tracked(fd)) die("writev");
    return syscall(SYS_writev, fd, parts, count);
}

static int cut(int fd, off_t size) {
    if (!is_tracked(fd)) return (int)syscall(SYS_ftruncate, fd, size);
    lock();
    int failed = (int)syscall(SYS_ftruncate, fd, size);
    if (!failed) put('T', number_of(fd), (uint64_t)size, NULL, 0, NULL, 0);
    unlock();
    return failed;
}
int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off_t size) { return cut(fd, size); }

static int synchronised(int fd, long call) {
    if (!is_tracked(fd)) return (int)syscall(call, fd);
    lock();
    int failed = (int)syscall(call, fd);
    if (!failed) {
        char link[64], path[WORDS];
        struct stat found;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(link, path, sizeof path - 1);
        path[size < 0 ? 0 : size] = 0;
        fstat(fd, &found);
        put_path('S', found.st_ino, S_ISDIR(found.st_mode), path);
    }
    unlock();
    return failed;
}
int fsync(int fd) { return synchronised(fd, SYS_fsync); }
int fdatasync(int fd) { return synchronised(fd, SYS_fdatasync); }

int fallocate(int fd, int mode, off_t place, off_t size) {
    if (is_tracked(fd)) die("fallocate");
    return (int)syscall(SYS_fallocate, fd, mode, place, size);
}
int posix_fallocate(int fd, off_t place, off_t size) {
    return fallocate(fd, 0, place, size) ? errno : 0;
}
int posix_fallocate64(int fd, off_t place, off_t size) { return posix_fallocate(fd, place, size); }

static void *mapped(void *at, size_t size, int protection, int flags, int fd, off_t place) {
    if (is_tracked(fd) && (flags & MAP_SHARED) && (protection & PROT_WRITE)) die("mmap");
    return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, place);
}
void *mmap(void *a, size_t n, int p, int f, int fd, off_t at) { return mapped(a, n, p, f, fd, at); }
void *mmap64(void *a, size_t n, int p, int f, int fd, off_t at) { return mapped(a, n, p, f, fd, at); }

/* -- names --------------------------------------------------------------------------------- */

static int named(char op, int at, const char *name, int to, const char *other, long failed_or_call,
                 long extra) {
    char path[WORDS], second[WORDS];
    int inside = below(at, name, path), outside = other != NULL && !below(to, other, second);
    if (!inside || outside)
        return (int)(other != NULL ? syscall(failed_or_call, at, name, to, other, extra)
                                   : syscall(failed_or_call, at, name, extra));
    lock();
    int failed = (int)(other != NULL ? syscall(failed_or_call, at, name, to, other, extra)
                                     : syscall(failed_or_call, at, name, extra));
    if (!failed) {
        if (other != NULL)
            put(op, 0, 0, path, strlen(path), second, strlen(second));
        else
            put_path(op, 0, 0, path);
    }
    unlock();
    return failed;
}

int rename(const char *old, const char *new) {
    return named('R', AT_FDCWD, old, AT_FDCWD, new, SYS_renameat2, 0);
}
int renameat(int from, const char *old, int to, const char *new) {
    return named('R', from, old, to, new, SYS_renameat2, 0);
}
int link(const char *old, const char *new) {
    return named('L', AT_FDCWD, old, AT_FDCWD, new, SYS_linkat, 0);
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    return named('L', from, old, to, new, SYS_linkat, flags);
}
int unlink(const char *path) { return named('U', AT_FDCWD, path, 0, NULL, SYS_unlinkat, 0); }
int unlinkat(int at, const char *path, int flags) {
    return named('U', at, path, 0, NULL, SYS_unlinkat, flags);
}
int rmdir(const char *path) { return named('U', AT_FDCWD, path, 0, NULL, SYS_unlinkat, AT_REMOVEDIR); }
int mkdir(const char *path, mode_t mode) {
    return named('M', AT_FDCWD, path, 0, NULL, SYS_mkdirat, mode);
}
int mkdirat(int at, const char *path, mode_t mode) {
    return named('M', at, path, 0, NULL, SYS_mkdirat, mode);
}
