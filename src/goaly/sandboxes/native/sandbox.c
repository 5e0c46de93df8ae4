/* PID 1 of a sandbox: makes its root, then runs commands, moves files, and turns what was written into a snapshot.
 *
 * Its own root is a tmpfs with the layers of folders that it stacks; each command's root is the stack (`m/N`), as another
 * user, without capabilities, behind the filter of system calls. The host's folders are gone before the first command. */
#define _GNU_SOURCE
#include "commands.h"
#include "starter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

static int n_layers, generation;
static char lower[MOST_LAYERS * 16];

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) {
        if (write(fd, text, strlen(text)) < 0) {}
        close(fd);
    }
}

static int bind_into(const char *from, const char *root, const char *name) {
    char at[64];
    snprintf(at, sizeof at, "%s/%s", root, name);
    mkdir(at, 0755);
    return mount(from, at, NULL, MS_BIND | MS_REC, NULL);
}

/* Stack the layers under a new, empty upper folder; -1 with errno. */
static int stack(void) {
    char options[sizeof lower + 128], upper[32], work[32], merged[32];
    snprintf(upper, sizeof upper, "u/%d", generation), snprintf(work, sizeof work, "w/%d", generation);
    snprintf(merged, sizeof merged, "m/%d", generation);
    snprintf(command_root, sizeof command_root, "/m/%d", generation);
    if ((mkdir(upper, 0755) && errno != EEXIST) || mkdir(work, 0755) || mkdir(merged, 0755)) return -1;
    snprintf(options, sizeof options, "userxattr,upperdir=%s,workdir=%s,lowerdir=%s", upper, work, lower);
    if (mount("sandbox", merged, "overlay", MS_NODEV | MS_NOSUID, options)) return -1;
    return bind_into("proc", merged, "proc") || bind_into("dev", merged, "dev") ? -1 : 0;
}

static void make_devices(void) {
    static const char *names[] = {"null", "zero", "full", "random", "urandom", "tty"};
    static const char *links[][2] = {{"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"},
        {"/proc/self/fd/2", "dev/stderr"}, {"pts/ptmx", "dev/ptmx"}};
    must(mount("dev", "dev", NULL, MS_BIND, NULL), "a folder of devices");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char host[32], here[32];
        snprintf(host, sizeof host, "/dev/%s", names[i]), snprintf(here, sizeof here, "dev/%s", names[i]);
        put(here, "");
        if (mount(host, here, NULL, MS_BIND, NULL) && i < 5) fail(host);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1])) {}
    mkdir("dev/shm", 0755), mkdir("dev/pts", 0755);
    must(mkdir("shm", 0755) || chmod("shm", 01777) || mount("shm", "dev/shm", NULL, MS_BIND, NULL), "/dev/shm");
    if (mount("pts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")) {}
    must(mount(NULL, "dev", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "read-only devices");
}

static void hide(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "u/0/%s", folder);
    for (char *slash = strchr(path + 4, '/'); slash; slash = strchr(slash + 1, '/')) *slash = 0, mkdir(path, 0755), *slash = '/';
    must(mkdir(path, 01777), folder);
    must(chmod(path, 01777), folder);
    must(setxattr(path, "user.overlay.opaque", "y", 1, 0), folder);
}

static void mask(const char *path) {
    if (mount("dev/null", path, NULL, MS_BIND, NULL)) {}
}

static void loopback_up(void) {
    int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    must(s < 0 ? -1 : ioctl(s, SIOCSIFFLAGS, &request), "loopback");
    close(s);
}

static void make_root(struct sandbox *sandbox) {
    char options[128];
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
    snprintf(options, sizeof options, "size=%s,nr_inodes=%s,mode=755", sandbox->bytes, sandbox->inodes);
    must(mount("sandbox", sandbox->folder, "tmpfs", MS_NOSUID | MS_NODEV, options), "a file system in memory");
    must(chdir(sandbox->folder), sandbox->folder);
    for (const char **name = (const char *[]){"l", "u", "w", "m", "proc", "dev", NULL}; *name; name++) must(mkdir(*name, 0755), *name);
    for (n_layers = 0; n_layers < sandbox->n_layers; n_layers++) {
        char at[16], from[128];
        snprintf(at, sizeof at, "l/%d", n_layers);
        must(mkdir(at, 0755), at);
        snprintf(from, sizeof from, "../layers/%s", sandbox->layers[n_layers]);
        must(mount(from, at, NULL, MS_BIND | MS_REC, NULL), sandbox->layers[n_layers]);
        strcat(strcat(lower, n_layers ? ":" : ""), at);
    }
    must(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "/proc");
    make_devices();
    static const char *masked[] = {"proc/kcore", "proc/keys", "proc/key-users", "proc/sysrq-trigger", "proc/timer_list", "proc/kallsyms"};
    for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) mask(masked[i]);
    must(mkdir("u/0", 0755), "u/0");
    for (int i = 0; i < sandbox->n_hidden; i++) hide(sandbox->hidden[i]);
    must(stack(), "stacked folders");
    must(syscall(SYS_pivot_root, ".", "."), "a root of its own");
    must(umount2(".", MNT_DETACH), "leaving the host's root");
    must(chdir("/"), "/");
    must(sethostname(sandbox->hostname, strlen(sandbox->hostname)), "a host name");
}

/* Everything that the sandbox's processes wrote becomes a folder that others can start from; they go on above it. Processes that
 * were killed a moment ago get a moment to end. */
static void snapshot(int signals) {
    char upper[32], old[32];
    struct pollfd ended = {signals, POLLIN, 0};
    while (!kill(-1, 0) && poll(&ended, 1, 200) > 0) reap(signals);
    if (!kill(-1, 0)) {
        errno = EBUSY;
        refuse("processes are still running");
        return;
    }
    snprintf(upper, sizeof upper, "/u/%d", generation), snprintf(old, sizeof old, "/m/%d", generation);
    if (n_layers + 1 >= MOST_LAYERS) errno = E2BIG;
    int layer = n_layers + 1 >= MOST_LAYERS ? -1 : (int)syscall(SYS_open_tree, AT_FDCWD, upper, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (layer < 0) {
        refuse("a snapshot");
        return;
    }
    size_t named = strlen(upper + 1);
    memmove(lower + named + 1, lower, strlen(lower) + 1);
    memcpy(lower, upper + 1, named), lower[named] = ':';
    n_layers++, generation++;
    if (stack()) fail("stacked folders");
    umount2(old, MNT_DETACH);
    wire_send(control, 'N', m.id, NULL, 0, &layer, 1);
    close(layer);
}

void sandbox_main(struct sandbox *sandbox) {
    char byte;
    control = sandbox->control, debuggable = sandbox->debuggable;
    must(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "the end with the server");
    if (read(sandbox->go, &byte, 1) != 1) _exit(1);
    /* Only now, because changing users would clear it. */
    must(setresgid(0, 0, 0), "the group of the namespace");
    must(setresuid(0, 0, 0), "the user of the namespace");
    must(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "the end with the server");
    must(unshare(CLONE_NEWNET), "a network of its own");
    make_root(sandbox);
    loopback_up();
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    if (control != 3) must(dup3(control, 3, O_CLOEXEC), "the control socket");
    control = 3;
    close_range(4, ~0u, 0);
    for (int fd = 0; fd < 3; fd++) close(fd), open("/dev/null", O_RDWR);
    int signals = command_signals();
    struct pollfd waiting[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
    wire_send(control, 'O', 0, NULL, 0, NULL, 0);
    for (;;) {
        if (poll(waiting, 2, -1) < 0 && errno != EINTR) _exit(1);
        if (waiting[1].revents) reap(signals);
        if (!waiting[0].revents) continue;
        int got = wire_receive(control, &m, MSG_DONTWAIT);
        if (!got) _exit(0);
        if (got < 0) continue;
        if (m.op == 'N') snapshot(signals);
        else serve_request();
        wire_close_fds(&m);
    }
}
