#define _GNU_SOURCE
#include "layers.h"
#include "starter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST 16384

static struct { char name[96]; uint32_t born; } layers[MOST];
static int n_layers, users = -1;

/* A folder with the sandboxes' users: user 0 of its files is root inside. */
static int mapped(int tree, int first_id) {
    if (first_id < 0) return 0;
    if (users < 0) {
        pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
        if (!pid) pause();
        map_ids(pid, first_id);
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
        users = open(path, O_RDONLY | O_CLOEXEC);
        kill(pid, SIGKILL);
        if (users < 0) return -1;
    }
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)users};
    return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes);
}

int layer_add(const char *name, const char *path, int snapshot, uint32_t born, int first_id) {
    char at[128];
    errno = n_layers == MOST ? EMFILE : strchr(name, '/') || *name == '.' || !*name || strlen(name) >= sizeof layers->name ? EINVAL : 0;
    if (errno || (!path && snapshot < 0)) return errno = errno ? errno : EINVAL, -1;
    snprintf(at, sizeof at, "../layers/%s", name);
    int tree = path ? (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (first_id < 0 ? AT_RECURSIVE : 0)) : snapshot;
    int failed = tree < 0 || (path && mapped(tree, first_id)) || (mkdir(at, 0755) && errno != EEXIST)
        || syscall(SYS_move_mount, tree, "", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH);
    int number = errno;
    if (path && tree >= 0) close(tree);
    errno = number;
    if (failed) return -1;
    layers[n_layers].born = born;
    strcpy(layers[n_layers++].name, name);
    return 0;
}

static int forget(int at) {
    char path[128];
    snprintf(path, sizeof path, "../layers/%s", layers[at].name);
    layers[at] = layers[--n_layers];
    return umount2(path, MNT_DETACH) || rmdir(path) ? -1 : 0;
}

int layer_forget(const char *name) {
    for (int i = 0; i < n_layers; i++)
        if (!strcmp(layers[i].name, name)) return forget(i);
    errno = ENOENT;
    return -1;
}

void layers_forget_of(uint32_t born) {
    for (int i = n_layers; i-- > 0;)
        if (layers[i].born == born) forget(i);
}
