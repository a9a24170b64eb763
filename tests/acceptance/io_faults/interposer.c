/* Makes system calls on files below one folder fail on request: an LD_PRELOAD library.
 *
 * It works one level above the kernel, on the functions of libc that Python, libstdc++ (and so torch) and Rust's standard
 * library call; a test compares what it sees with strace. Nothing happens until a process attaches to a region, a file
 * mapped into memory that says which calls are watched and which one fails, and that counts for all processes attached
 * to it. A process is attached while its environment variable T5_IO_FAULTS names a region. Attachment survives fork.
 *
 * A call is identified by its kind ("open", "read", ...), its path relative to the watched folder with random parts
 * replaced by "*", and its ordinal among the calls of that kind on that path.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utime.h>

#define EXPORT __attribute__((visibility("default")))
#define PATH_BYTES 1024
#define LOG_BYTES (16 << 20)
#define VARIABLE "T5_IO_FAULTS"

enum mode { RECORD = 0, ONCE = 1, PERMANENTLY = 2 };

/* Mirrored by interposer.py. */
struct region {
    int32_t mode;
    int32_t error;
    uint32_t ordinal;            /* from 1 */
    uint32_t matched;            /* calls of the wanted kind on the wanted path so far */
    uint32_t fired;              /* calls that were made to fail */
    uint32_t log_used;
    char kind[32];
    char path[PATH_BYTES];       /* relative, normalised; of two paths "from > to" */
    char folder[PATH_BYTES];     /* absolute, without a trailing slash */
    char failed[2][PATH_BYTES];  /* the absolute paths of the first call that failed */
    char log[LOG_BYTES];         /* RECORD: "kind\tpath\n" for each call */
};

static struct region *region;

static void attach(const char *path)
{
    int descriptor = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    void *mapped = (void *)syscall(SYS_mmap, NULL, sizeof(struct region), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    syscall(SYS_close, descriptor);
    if (descriptor < 0 || ((long)mapped < 0 && (long)mapped > -4096)) {
        perror(path);
        abort();
    }
    region = mapped;
}

__attribute__((constructor)) static void attach_by_environment(void)
{
    const char *path = getenv(VARIABLE);
    if (path && *path)
        attach(path);
}

/* Paths */

static int path_of_descriptor(int descriptor, char *into)
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, into, PATH_BYTES - 1);
    if (length <= 0)
        return 0;
    into[length] = 0;
    static const char deleted[] = " (deleted)";
    long suffix = sizeof deleted - 1;
    if (length > suffix && !strcmp(into + length - suffix, deleted))
        into[length - suffix] = 0;
    return into[0] == '/';
}

/* Removes "//", "/./" and a trailing slash; ".." is left, as a link may stand before it. */
static void tidy(char *path)
{
    char *to = path;
    for (const char *from = path; *from;) {
        if (from[0] == '/' && (from[1] == '/' || from[1] == 0)) {
            from++;
        } else if (from[0] == '/' && from[1] == '.' && (from[2] == '/' || from[2] == 0)) {
            from += 2;
        } else {
            *to++ = *from++;
        }
    }
    *to = 0;
}

static int absolute_path(int folder, const char *path, char *into)
{
    if (!path)
        return 0;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_BYTES)
            return 0;
        strcpy(into, path);
    } else {
        char base[PATH_BYTES];
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) <= 0)
                return 0;
        } else if (!path_of_descriptor(folder, base)) {
            return 0;
        }
        if (snprintf(into, PATH_BYTES, *path ? "%s/%s" : "%s", base, path) >= PATH_BYTES)
            return 0;
    }
    tidy(into);
    return 1;
}

static const char *below_the_folder(const char *path)
{
    size_t length = strlen(region->folder);
    if (strncmp(path, region->folder, length) || (path[length] && path[length] != '/'))
        return NULL;
    return path[length] ? path + length + 1 : ".";
}

static int is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '_';
}

/* Writes "*" for eight characters that secrets.token_hex or tempfile drew: a word of that length after "." or "-" that
 * has a digit, but for the number of a step, or that ends the name of a hidden file; and for the inode of a file that has
 * no name ("#123"). */
static void normalise(const char *path, char *into)
{
    const char *start = path, *name = path;
    while (*path) {
        if (path > start && path[-1] == '/')
            name = path;
        size_t length = 0;
        while (is_word(path[length]))
            length++;
        int is_nameless = path > start && path[-1] == '#';
        int after_mark = path > start && (path[-1] == '.' || path[-1] == '-');
        int has_digit = 0, has_letter = 0;
        for (size_t i = 0; i < length; i++) {
            has_digit |= path[i] >= '0' && path[i] <= '9';
            has_letter |= !(path[i] >= '0' && path[i] <= '9');
        }
        int is_step = !has_letter && path - start >= 5 && !strncmp(path - 5, "step-", 5);
        int ends_hidden = name[0] == '.' && path[-after_mark] == '-' && (path[length] == 0 || path[length] == '/');
        if ((length == 8 && after_mark && (has_digit || ends_hidden) && !is_step) || (length && is_nameless)) {
            *into++ = '*';
            path += length;
        } else if (length) {
            memcpy(into, path, length);
            into += length;
            path += length;
        } else {
            *into++ = *path++;
        }
    }
    *into = 0;
}

/* The decision */

static void record(const char *kind, const char *path)
{
    char line[2 * PATH_BYTES + 64];
    int length = snprintf(line, sizeof line, "%s\t%s\n", kind, path);
    uint32_t at = __atomic_fetch_add(&region->log_used, (uint32_t)length, __ATOMIC_SEQ_CST);
    if (at + length <= LOG_BYTES)
        memcpy(region->log + at, line, length);
}

static int has_failed_before(const char *path)
{
    return path && *path && (!strcmp(path, region->failed[0]) || !strcmp(path, region->failed[1]));
}

/* Whether a call on these absolute paths (the second may be NULL) is to fail; then errno is set. */
static int fails(const char *kind, const char *one, const char *other)
{
    const char *first = one ? below_the_folder(one) : NULL;
    const char *second = other ? below_the_folder(other) : NULL;
    if (!first && !second)
        return 0;
    char path[2 * PATH_BYTES + 8] = "", *end = path;
    if (first)
        normalise(first, path);
    if (second) {
        end += strlen(path);
        if (first)
            end += sprintf(end, " > ");
        normalise(second, end);
    }
    if (region->mode == RECORD) {
        record(kind, path);
        return 0;
    }
    int fail = 0;
    if (region->mode == PERMANENTLY && __atomic_load_n(&region->fired, __ATOMIC_SEQ_CST))
        fail = has_failed_before(one) || has_failed_before(other);
    if (!fail && !strcmp(kind, region->kind) && !strcmp(path, region->path)) {
        fail = __atomic_add_fetch(&region->matched, 1, __ATOMIC_SEQ_CST) == region->ordinal;
        if (fail) {
            strcpy(region->failed[0], one ? one : "");
            strcpy(region->failed[1], other ? other : "");
        }
    }
    if (fail) {
        __atomic_fetch_add(&region->fired, 1, __ATOMIC_SEQ_CST);
        errno = region->error;
    }
    return fail;
}

static int fails_at(const char *kind, int folder, const char *path)
{
    char absolute[PATH_BYTES];
    if (!region)
        return 0;
    int before = errno;
    if (absolute_path(folder, path, absolute) && fails(kind, absolute, NULL))
        return 1;
    errno = before;
    return 0;
}

static int fails_of(const char *kind, int descriptor)
{
    char absolute[PATH_BYTES];
    if (!region || descriptor < 0)
        return 0;
    int before = errno;
    if (path_of_descriptor(descriptor, absolute) && fails(kind, absolute, NULL))
        return 1;
    errno = before;
    return 0;
}

static int fails_between(const char *kind, int from_folder, const char *from, int to_folder, const char *to)
{
    char one[PATH_BYTES], other[PATH_BYTES];
    if (!region)
        return 0;
    int before = errno;
    int has_one = absolute_path(from_folder, from, one), has_other = absolute_path(to_folder, to, other);
    if (fails(kind, has_one ? one : NULL, has_other ? other : NULL))
        return 1;
    errno = before;
    return 0;
}

/* ``name`` of the libraries behind this one. */
#define NEXT(name)                                            \
    ({                                                        \
        static __typeof__(&name) next;                        \
        if (!next)                                            \
            next = (__typeof__(next))dlsym(RTLD_NEXT, #name); \
        next;                                                 \
    })

#define MODE_OF_NEW(flags)                   \
    mode_t mode = 0;                         \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest;                        \
        va_start(rest, flags);               \
        mode = va_arg(rest, mode_t);         \
        va_end(rest);                        \
    }

/* ``result name parameters`` does as libc's unless the call is to fail. */
#define UNLESS(fails, result, failed, name, parameters, arguments) \
    EXPORT result name parameters { return (fails) ? (failed) : NEXT(name) arguments; }
#define ON_PATH(kind, name, parameters, arguments) UNLESS(fails_at(kind, AT_FDCWD, path), int, -1, name, parameters, arguments)
#define AT_PATH(kind, name, parameters, arguments) UNLESS(fails_at(kind, folder, path), int, -1, name, parameters, arguments)
#define ON_FILE(kind, result, name, parameters, arguments) \
    UNLESS(fails_of(kind, descriptor), result, -1, name, parameters, arguments)
#define ON_BOTH(kind, name, parameters, arguments) \
    UNLESS(fails_between(kind, from_folder, from, to_folder, to), int, -1, name, parameters, arguments)
/* Another name of a function of ours: in libc's checked builds, and in programs that were linked with a libc before 2.33,
 * whose functions of these names nobody can ask for any more. */
#define ALIAS(result, name, parameters, call) \
    EXPORT result name parameters { return call; }

/* environment */

EXPORT int setenv(const char *name, const char *value, int overwrite)
{
    if (!strcmp(name, VARIABLE))
        attach(value);
    return NEXT(setenv)(name, value, overwrite);
}

EXPORT int unsetenv(const char *name)
{
    if (!strcmp(name, VARIABLE))
        region = NULL;
    return NEXT(unsetenv)(name);
}

/* open */

EXPORT int open(const char *path, int flags, ...)
{
    MODE_OF_NEW(flags)
    return fails_at("open", AT_FDCWD, path) ? -1 : NEXT(open)(path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...)
{
    MODE_OF_NEW(flags)
    return fails_at("open", AT_FDCWD, path) ? -1 : NEXT(open64)(path, flags, mode);
}

EXPORT int openat(int folder, const char *path, int flags, ...)
{
    MODE_OF_NEW(flags)
    return fails_at("open", folder, path) ? -1 : NEXT(openat)(folder, path, flags, mode);
}

EXPORT int openat64(int folder, const char *path, int flags, ...)
{
    MODE_OF_NEW(flags)
    return fails_at("open", folder, path) ? -1 : NEXT(openat64)(folder, path, flags, mode);
}

ALIAS(int, __open_2, (const char *path, int flags), open(path, flags))
ALIAS(int, __open64_2, (const char *path, int flags), open64(path, flags))
ALIAS(int, __openat_2, (int folder, const char *path, int flags), openat(folder, path, flags))
ALIAS(int, __openat64_2, (int folder, const char *path, int flags), openat64(folder, path, flags))
ON_PATH("open", creat, (const char *path, mode_t mode), (path, mode))
ON_PATH("open", creat64, (const char *path, mode_t mode), (path, mode))

#define OPENS_A_STREAM(name, parameters, arguments) \
    UNLESS(path && fails_at("open", AT_FDCWD, path), FILE *, NULL, name, parameters, arguments)
OPENS_A_STREAM(fopen, (const char *restrict path, const char *restrict mode), (path, mode))
OPENS_A_STREAM(fopen64, (const char *restrict path, const char *restrict mode), (path, mode))
OPENS_A_STREAM(freopen, (const char *restrict path, const char *restrict mode, FILE *restrict old), (path, mode, old))
OPENS_A_STREAM(freopen64, (const char *restrict path, const char *restrict mode, FILE *restrict old), (path, mode, old))

/* read and write */

#define READS(name, parameters, arguments) ON_FILE("read", ssize_t, name, parameters, arguments)
#define WRITES(name, parameters, arguments) ON_FILE("write", ssize_t, name, parameters, arguments)
typedef const struct iovec *parts_t;
READS(read, (int descriptor, void *into, size_t count), (descriptor, into, count))
READS(pread, (int descriptor, void *into, size_t count, off_t at), (descriptor, into, count, at))
READS(pread64, (int descriptor, void *into, size_t count, off64_t at), (descriptor, into, count, at))
READS(readv, (int descriptor, parts_t parts, int count), (descriptor, parts, count))
READS(preadv, (int descriptor, parts_t parts, int count, off_t at), (descriptor, parts, count, at))
READS(preadv64, (int descriptor, parts_t parts, int count, off64_t at), (descriptor, parts, count, at))
READS(preadv2, (int descriptor, parts_t parts, int count, off_t at, int flags), (descriptor, parts, count, at, flags))
READS(preadv64v2, (int descriptor, parts_t parts, int count, off64_t at, int flags), (descriptor, parts, count, at, flags))
WRITES(write, (int descriptor, const void *from, size_t count), (descriptor, from, count))
WRITES(pwrite, (int descriptor, const void *from, size_t count, off_t at), (descriptor, from, count, at))
WRITES(pwrite64, (int descriptor, const void *from, size_t count, off64_t at), (descriptor, from, count, at))
WRITES(writev, (int descriptor, parts_t parts, int count), (descriptor, parts, count))
WRITES(pwritev, (int descriptor, parts_t parts, int count, off_t at), (descriptor, parts, count, at))
WRITES(pwritev64, (int descriptor, parts_t parts, int count, off64_t at), (descriptor, parts, count, at))
WRITES(pwritev2, (int descriptor, parts_t parts, int count, off_t at, int flags), (descriptor, parts, count, at, flags))
WRITES(pwritev64v2, (int descriptor, parts_t parts, int count, off64_t at, int flags), (descriptor, parts, count, at, flags))
ALIAS(ssize_t, __read_chk, (int descriptor, void *into, size_t count, size_t), read(descriptor, into, count))
ALIAS(ssize_t, __pread_chk, (int descriptor, void *into, size_t count, off_t at, size_t), pread(descriptor, into, count, at))
ALIAS(ssize_t, __pread64_chk, (int descriptor, void *into, size_t count, off64_t at, size_t), pread64(descriptor, into, count, at))
UNLESS(fails_of("read", fileno(stream)), size_t, 0, fread,
       (void *restrict into, size_t size, size_t count, FILE *restrict stream), (into, size, count, stream))
UNLESS(fails_of("write", fileno(stream)), size_t, 0, fwrite,
       (const void *restrict from, size_t size, size_t count, FILE *restrict stream), (from, size, count, stream))
#define COPIES(name, parameters, arguments) \
    UNLESS(fails_of("read", from) || fails_of("write", to), ssize_t, -1, name, parameters, arguments)
COPIES(copy_file_range, (int from, off64_t *from_at, int to, off64_t *to_at, size_t count, unsigned flags),
       (from, from_at, to, to_at, count, flags))
COPIES(sendfile, (int to, int from, off_t *at, size_t count), (to, from, at, count))
COPIES(sendfile64, (int to, int from, off64_t *at, size_t count), (to, from, at, count))
#define MAPS(name, parameters)                                                                            \
    UNLESS(!(flags & MAP_ANONYMOUS) && fails_of("mmap", descriptor), void *, MAP_FAILED, name, parameters, \
           (address, length, protection, flags, descriptor, at))
MAPS(mmap, (void *address, size_t length, int protection, int flags, int descriptor, off_t at))
MAPS(mmap64, (void *address, size_t length, int protection, int flags, int descriptor, off64_t at))

/* durability, size and locks */

ON_FILE("fsync", int, fsync, (int descriptor), (descriptor))
ON_FILE("fsync", int, fdatasync, (int descriptor), (descriptor))
ON_FILE("fsync", int, sync_file_range, (int descriptor, off64_t at, off64_t count, unsigned flags), (descriptor, at, count, flags))
ON_FILE("truncate", int, ftruncate, (int descriptor, off_t length), (descriptor, length))
ON_FILE("truncate", int, ftruncate64, (int descriptor, off64_t length), (descriptor, length))
ON_FILE("truncate", int, fallocate, (int descriptor, int mode, off_t at, off_t length), (descriptor, mode, at, length))
ON_FILE("truncate", int, fallocate64, (int descriptor, int mode, off64_t at, off64_t length), (descriptor, mode, at, length))
UNLESS(fails_of("truncate", descriptor), int, errno, posix_fallocate, (int descriptor, off_t at, off_t length), (descriptor, at, length))
UNLESS(fails_of("truncate", descriptor), int, errno, posix_fallocate64, (int descriptor, off64_t at, off64_t length), (descriptor, at, length))
ON_PATH("truncate", truncate, (const char *path, off_t length), (path, length))
ON_PATH("truncate", truncate64, (const char *path, off64_t length), (path, length))
ON_FILE("lock", int, flock, (int descriptor, int operation), (descriptor, operation))

/* names */

UNLESS(fails_between("rename", AT_FDCWD, from, AT_FDCWD, to), int, -1, rename, (const char *from, const char *to), (from, to))
ON_BOTH("rename", renameat, (int from_folder, const char *from, int to_folder, const char *to), (from_folder, from, to_folder, to))
ON_BOTH("rename", renameat2, (int from_folder, const char *from, int to_folder, const char *to, unsigned flags),
        (from_folder, from, to_folder, to, flags))
UNLESS(fails_between("link", AT_FDCWD, from, AT_FDCWD, to), int, -1, link, (const char *from, const char *to), (from, to))
ON_BOTH("link", linkat, (int from_folder, const char *from, int to_folder, const char *to, int flags),
        (from_folder, from, to_folder, to, flags))
ON_PATH("link", symlink, (const char *target, const char *path), (target, path))
AT_PATH("link", symlinkat, (const char *target, int folder, const char *path), (target, folder, path))
ON_PATH("unlink", unlink, (const char *path), (path))
UNLESS(fails_at(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path), int, -1, unlinkat,
       (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH("unlink", remove, (const char *path), (path))
ON_PATH("rmdir", rmdir, (const char *path), (path))
ON_PATH("mkdir", mkdir, (const char *path, mode_t mode), (path, mode))
AT_PATH("mkdir", mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
UNLESS(fails_at("readlink", AT_FDCWD, path), ssize_t, -1, readlink,
       (const char *restrict path, char *restrict into, size_t count), (path, into, count))
UNLESS(fails_at("readlink", folder, path), ssize_t, -1, readlinkat,
       (int folder, const char *restrict path, char *restrict into, size_t count), (folder, path, into, count))

/* attributes */

ON_PATH("stat", stat, (const char *restrict path, struct stat *restrict into), (path, into))
ON_PATH("stat", stat64, (const char *restrict path, struct stat64 *restrict into), (path, into))
ON_PATH("stat", lstat, (const char *restrict path, struct stat *restrict into), (path, into))
ON_PATH("stat", lstat64, (const char *restrict path, struct stat64 *restrict into), (path, into))
ON_FILE("stat", int, fstat, (int descriptor, struct stat *into), (descriptor, into))
ON_FILE("stat", int, fstat64, (int descriptor, struct stat64 *into), (descriptor, into))
AT_PATH("stat", fstatat, (int folder, const char *restrict path, struct stat *restrict into, int flags), (folder, path, into, flags))
AT_PATH("stat", fstatat64, (int folder, const char *restrict path, struct stat64 *restrict into, int flags), (folder, path, into, flags))
AT_PATH("stat", statx, (int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict into),
        (folder, path, flags, mask, into))
ALIAS(int, __xstat, (int, const char *path, struct stat *into), stat(path, into))
ALIAS(int, __xstat64, (int, const char *path, struct stat64 *into), stat64(path, into))
ALIAS(int, __lxstat, (int, const char *path, struct stat *into), lstat(path, into))
ALIAS(int, __lxstat64, (int, const char *path, struct stat64 *into), lstat64(path, into))
ALIAS(int, __fxstat, (int, int descriptor, struct stat *into), fstat(descriptor, into))
ALIAS(int, __fxstat64, (int, int descriptor, struct stat64 *into), fstat64(descriptor, into))
ALIAS(int, __fxstatat, (int, int folder, const char *path, struct stat *into, int flags), fstatat(folder, path, into, flags))
ALIAS(int, __fxstatat64, (int, int folder, const char *path, struct stat64 *into, int flags), fstatat64(folder, path, into, flags))
ON_PATH("access", access, (const char *path, int wanted), (path, wanted))
AT_PATH("access", faccessat, (int folder, const char *path, int wanted, int flags), (folder, path, wanted, flags))
ON_PATH("chmod", chmod, (const char *path, mode_t mode), (path, mode))
ON_FILE("chmod", int, fchmod, (int descriptor, mode_t mode), (descriptor, mode))
AT_PATH("chmod", fchmodat, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags))
ON_PATH("utime", utime, (const char *path, const struct utimbuf *times), (path, times))
ON_PATH("utime", utimes, (const char *path, const struct timeval times[2]), (path, times))
AT_PATH("utime", utimensat, (int folder, const char *path, const struct timespec times[2], int flags), (folder, path, times, flags))
ON_FILE("utime", int, futimens, (int descriptor, const struct timespec times[2]), (descriptor, times))
ON_PATH("statfs", statvfs, (const char *restrict path, struct statvfs *restrict into), (path, into))
ON_PATH("statfs", statvfs64, (const char *restrict path, struct statvfs64 *restrict into), (path, into))
ON_PATH("statfs", statfs, (const char *path, struct statfs *into), (path, into))
ON_PATH("statfs", statfs64, (const char *path, struct statfs64 *into), (path, into))
ON_FILE("statfs", int, fstatvfs, (int descriptor, struct statvfs *into), (descriptor, into))
ON_FILE("statfs", int, fstatvfs64, (int descriptor, struct statvfs64 *into), (descriptor, into))
ON_FILE("statfs", int, fstatfs, (int descriptor, struct statfs *into), (descriptor, into))
ON_FILE("statfs", int, fstatfs64, (int descriptor, struct statfs64 *into), (descriptor, into))

/* folders: of the many readdir() that answer from one buffer, those count that ask the kernel: the first and the last */

#define MOST_FOLDERS 256
static DIR *fresh[MOST_FOLDERS];
static pthread_mutex_t folders = PTHREAD_MUTEX_INITIALIZER;

/* Replaces one of ``fresh``, if it is there, by another. */
static int replace_folder(DIR *old, DIR *new)
{
    int found = 0;
    pthread_mutex_lock(&folders);
    for (int i = 0; i < MOST_FOLDERS && !found; i++)
        if (fresh[i] == old) {
            fresh[i] = new;
            found = 1;
        }
    pthread_mutex_unlock(&folders);
    return found;
}

EXPORT DIR *opendir(const char *path)
{
    DIR *opened = fails_at("open", AT_FDCWD, path) ? NULL : NEXT(opendir)(path);
    if (opened && region)
        replace_folder(NULL, opened);
    return opened;
}

EXPORT DIR *fdopendir(int descriptor)
{
    DIR *opened = NEXT(fdopendir)(descriptor);
    if (opened && region)
        replace_folder(NULL, opened);
    return opened;
}

EXPORT int closedir(DIR *folder)
{
    if (region)
        replace_folder(folder, NULL);
    return NEXT(closedir)(folder);
}

#define READS_A_FOLDER(name, entry_t)                                                                   \
    EXPORT entry_t *name(DIR *folder)                                                                   \
    {                                                                                                   \
        if (region && replace_folder(folder, NULL) && fails_of("readdir", dirfd(folder)))               \
            return NULL;                                                                                \
        int before = errno;                                                                             \
        entry_t *entry = NEXT(name)(folder);                                                            \
        return entry || errno != before || !fails_of("readdir", dirfd(folder)) ? entry : NULL;          \
    }
READS_A_FOLDER(readdir, struct dirent)
READS_A_FOLDER(readdir64, struct dirent64)
