/* Files into and out of a sandbox, by a process that is already inside it and has its user.
 *
 * A stream is a sequence of entries: a kind (`f` file, `d` folder, `l` link), its mode (32 bits), the length of its path
 * (32 bits) and of its contents (64 bits), then both. The contents of a link are its target. */
#define _GNU_SOURCE
#include "wire.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct entry { char kind; uint32_t mode, path; uint64_t bytes; } __attribute__((packed));

static int exactly(int fd, void *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = read(fd, (char *)to + done, bytes - done);
        if (n <= 0 && !(n < 0 && errno == EINTR)) return done ? -1 : 0;
        if (n > 0) done += (size_t)n;
    }
    return 1;
}

static int all(int fd, const void *from, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = write(fd, (const char *)from + done, bytes - done);
        if (n < 0 && errno != EINTR) return -1;
        if (n > 0) done += (size_t)n;
    }
    return 0;
}

static void make_parents(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
    }
}

/* Writes the entries of a stream below a folder; errno is 0 or the first error. */
void files_write(int from, const char *folder) {
    static char buffer[1 << 16], path[8192];
    struct entry e;
    int got;
    size_t start = strlen(folder);
    memcpy(path, folder, start);
    while ((got = exactly(from, &e, sizeof e)) > 0) {
        if (e.path + start + 2 > sizeof path) { errno = ENAMETOOLONG; return; }
        path[start] = '/';
        if (exactly(from, path + start + 1, e.path) <= 0) break;
        path[start + 1 + e.path] = 0;
        if (!e.path) path[start] = 0;
        make_parents(path);
        int fd = -1;
        if (e.kind == 'd') {
            if (mkdir(path, e.mode) && errno != EEXIST) return;
            chmod(path, e.mode);
        } else if (e.kind == 'f') {
            fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, e.mode);
            if (fd < 0) return;
        }
        size_t kept = 0;
        for (uint64_t left = e.bytes; left;) {
            size_t n = left < sizeof buffer ? (size_t)left : sizeof buffer;
            if (exactly(from, buffer, n) <= 0) { errno = EPIPE; return; }
            if (fd >= 0 && all(fd, buffer, n)) return;
            left -= n, kept = n;
        }
        if (e.kind == 'l') {
            buffer[kept < sizeof buffer ? kept : sizeof buffer - 1] = 0;
            if (symlink(buffer, path) && (errno != EEXIST || unlink(path) || symlink(buffer, path))) return;
        }
        if (fd >= 0 && (fchmod(fd, e.mode) | close(fd)) < 0) return;
        errno = 0;
    }
    errno = got < 0 ? EPIPE : 0;
}

static int send_entry(int to, char kind, const struct stat *s, const char *path, uint64_t bytes) {
    struct entry e = {kind, (uint32_t)(s->st_mode & 07777), (uint32_t)strlen(path), bytes};
    return all(to, &e, sizeof e) || all(to, path, e.path) ? -1 : 0;
}

/* A file's contents have the length that was announced, whatever is written to it meanwhile. */
static int send_contents(int to, int fd, uint64_t left) {
    static char buffer[1 << 16];
    while (left) {
        ssize_t n = read(fd, buffer, left < sizeof buffer ? (size_t)left : sizeof buffer);
        if (n < 0) return -1;
        if (n == 0) memset(buffer, 0, n = (ssize_t)(left < sizeof buffer ? left : sizeof buffer));
        if (all(to, buffer, (size_t)n)) return -1;
        left -= (uint64_t)n;
    }
    return 0;
}

static int walk(int to, int parent, const char *name, char *path, size_t length, int depth) {
    struct stat s;
    int fd, result = 0;
    if (fstatat(parent, name, &s, depth ? AT_SYMLINK_NOFOLLOW : 0)) return -1;
    if (S_ISLNK(s.st_mode)) {
        char target[4096];
        ssize_t n = readlinkat(parent, name, target, sizeof target);
        return n < 0 || send_entry(to, 'l', &s, path, (uint64_t)n) || all(to, target, (size_t)n) ? -1 : 0;
    }
    if (!S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode)) return 0;
    fd = openat(parent, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | (depth ? O_NOFOLLOW : 0));
    if (fd < 0 || fstat(fd, &s)) return -1;
    if (S_ISREG(s.st_mode)) {
        result = send_entry(to, 'f', &s, path, (uint64_t)s.st_size) || send_contents(to, fd, (uint64_t)s.st_size) ? -1 : 0;
        close(fd);
        return result;
    }
    if (send_entry(to, 'd', &s, path, 0)) return -1;
    if (depth > 128) { errno = ELOOP; return -1; }
    DIR *folder = fdopendir(fd);
    for (struct dirent *d; !result && folder && (d = readdir(folder));) {
        size_t n = strlen(d->d_name);
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, "..")) continue;
        if (length + n + 2 > 8192) { errno = ENAMETOOLONG; result = -1; break; }
        size_t at = length;
        if (at) path[at++] = '/';
        memcpy(path + at, d->d_name, n + 1);
        result = walk(to, fd, d->d_name, path, at + n, depth + 1);
        path[length] = 0;
    }
    int kept = errno;
    if (folder) closedir(folder);
    errno = kept;
    return result;
}

/* Sends what is at a path, links as links below it; errno is 0 or the first error. */
void files_read(int to, const char *at) {
    static char path[8192];
    if (!walk(to, AT_FDCWD, at, path, 0, 0)) errno = 0;
}
