/* PID 1 of a sandbox: makes its root, then runs commands, moves files, and turns what was written into a snapshot.
 *
 * Its own root is a tmpfs with the layers of folders that it stacks; each command's root is the stack (`m/N`), as another
 * user, without capabilities, behind the filter of system calls. The host's folders are gone before the first command. */
#define _GNU_SOURCE
#include "wire.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
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
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <netinet/in.h>
#include <unistd.h>

#define MOST_COMMANDS 1024
#define MOST_WORDS 4096
#define MOST_LAYERS 400

void files_write(int from, const char *folder);
void files_read(int to, const char *path);

static struct message m;
static struct { uint32_t id; pid_t pid; } commands[MOST_COMMANDS];
static int control, debuggable, n_layers, generation;
static char lower[MOST_LAYERS * 16];

static void fail(const char *doing) {
    wire_say(control, 'E', 0, "%s: %s", doing, strerror(errno));
    _exit(1);
}

static void must(long result, const char *doing) {
    if (result < 0) fail(doing);
}

/* Answers a request with an error: its number and what it is about. */
static void refuse(const char *what) {
    int number = errno;
    char fields[4200];
    int length = snprintf(fields, sizeof fields, "%d%c%.4000s", number, 0, what);
    wire_send(control, 'F', m.id, fields, (size_t)length + 1, NULL, 0);
    errno = number;
}

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
    if ((mkdir(upper, 0755) && errno != EEXIST) || mkdir(work, 0755) || mkdir(merged, 0755)) return -1;
    snprintf(options, sizeof options, "userxattr,upperdir=%s,workdir=%s,lowerdir=%s", upper, work, lower);
    if (mount("sandbox", merged, "overlay", MS_NODEV | MS_NOSUID, options)) return -1;
    return bind_into("proc", merged, "proc") || bind_into("dev", merged, "dev") ? -1 : 0;
}

static void make_devices(void) {
    static const char *names[] = {"null", "zero", "full", "random", "urandom", "tty"};
    static const char *links[][2] = {{"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"},
        {"/proc/self/fd/2", "dev/stderr"}, {"pts/ptmx", "dev/ptmx"}};
    must(mount("devices", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=64,mode=755"), "a folder of devices");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char host[32], here[32];
        snprintf(host, sizeof host, "/dev/%s", names[i]), snprintf(here, sizeof here, "dev/%s", names[i]);
        put(here, "");
        if (mount(host, here, NULL, MS_BIND, NULL) && i < 5) fail(host);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1])) {}
    mkdir("dev/shm", 01777), mkdir("dev/pts", 0755);
    must(mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=4096,mode=1777"), "/dev/shm");
    if (mount("pts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")) {}
    must(mount("devices", "dev", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL), "read-only devices");
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
        char at[16];
        snprintf(at, sizeof at, "l/%d", n_layers);
        must(mkdir(at, 0755), at);
        must(mount(sandbox->layers[n_layers], at, NULL, MS_BIND | MS_REC, NULL), sandbox->layers[n_layers]);
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

/* What a command's process does before its program, or a file operation: no way back. */
static void become(uid_t uid, gid_t gid) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    char root[32];
    snprintf(root, sizeof root, "/m/%d", generation);
    must(chroot(root), "the sandbox's root");
    must(chdir("/"), "/");
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (int cap = 0; cap <= 63; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    if (setgroups(1, &gid)) {}   /* refused in an ordinary user's namespace, which has no other groups */
    must(setresgid(gid, gid, gid), "the group");
    must(setresuid(uid, uid, uid), "the user");
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    must(syscall(SYS_capset, &head, none), "no capabilities");
    must(forbid_system_calls(debuggable), "the filter of system calls");
    sigset_t no_signals;
    sigemptyset(&no_signals);
    sigprocmask(SIG_SETMASK, &no_signals, NULL);
    umask(022);
}

static void answer_started(pid_t pid) {
    if (pid < 0) {
        refuse("a process");
        return;
    }
    for (int i = 0; i < MOST_COMMANDS; i++)
        if (!commands[i].pid) {
            commands[i].id = m.id, commands[i].pid = pid;
            return;
        }
}

static int room_for_a_command(void) {
    for (int i = 0; i < MOST_COMMANDS; i++)
        if (!commands[i].pid) return 1;
    errno = EAGAIN;
    return 0;
}

/* Fields: user, group, folder, number of limits, (resource, value) each, number of words, words, variables. Descriptors: the program's, from 0. */
static void run(void) {
    pid_t pid = room_for_a_command() ? fork() : -1;
    if (pid) {
        answer_started(pid);
        return;
    }
    static char *words[MOST_WORDS], *variables[MOST_WORDS];
    uid_t uid = (uid_t)wire_number(&m);
    gid_t gid = (gid_t)wire_number(&m);
    const char *folder = wire_text(&m);
    struct rlimit limits[16];
    int resources[16], n_limits = (int)wire_number(&m);
    for (int i = 0; i < n_limits; i++) {
        int resource = (int)wire_number(&m);
        rlim_t value = (rlim_t)wire_number(&m);
        if (i < 16) resources[i] = resource, limits[i] = (struct rlimit){value, value};
    }
    long n_words = wire_number(&m), n = 0;
    while (n < n_words && n < MOST_WORDS - 1) words[n++] = (char *)wire_text(&m);
    n = 0;
    while (m.at < m.length && n < MOST_WORDS - 1) variables[n++] = (char *)wire_text(&m);
    setsid();
    int report = fcntl(control, F_DUPFD_CLOEXEC, 64);
    for (int i = 0; i < m.n_fds; i++) m.fds[i] = fcntl(m.fds[i], F_DUPFD_CLOEXEC, 65);
    for (int i = 0; i < m.n_fds; i++) dup2(m.fds[i], i);
    close_range((unsigned)m.n_fds, ~0u, CLOSE_RANGE_CLOEXEC);
    control = report;
    become(uid, gid);
    if (chdir(folder)) dprintf(2, "%s: %s\n", folder, strerror(errno)), _exit(126);
    for (int i = 0; i < n_limits && i < 16; i++) setrlimit(resources[i], &limits[i]);
    execvpe(words[0], words, variables);
    dprintf(2, "%s: %s\n", words[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

/* Fields: user, group, path. Descriptor: where the files come from (`W`) or go to (`G`). */
static void move_files(void) {
    pid_t pid = room_for_a_command() ? fork() : -1;
    if (pid) {
        answer_started(pid);
        return;
    }
    uid_t uid = (uid_t)wire_number(&m);
    gid_t gid = (gid_t)wire_number(&m);
    const char *path = wire_text(&m);
    become(uid, gid);
    errno = 0;
    if (m.op == 'W') files_write(m.fds[0], path);
    else files_read(m.fds[0], path);
    if (errno) refuse(path);
    _exit(errno ? 1 : 0);
}

/* Sends a signal to all process groups of a session but the leader's and those in the message. */
static void end_session(pid_t leader, int number) {
    DIR *all = opendir("/proc");
    for (struct dirent *d; all && (d = readdir(all));) {
        char path[300], text[512];
        int pgrp = 0, session = 0, kept = 0;
        if (*d->d_name < '0' || *d->d_name > '9') continue;
        snprintf(path, sizeof path, "/proc/%s/stat", d->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
        if (fd >= 0) close(fd);
        if (n <= 0) continue;
        text[n] = 0;
        char *after = strrchr(text, ')');   /* a program's name may have blanks and brackets */
        if (!after || sscanf(after + 1, " %*c %*d %d %d", &pgrp, &session) != 2 || session != leader || pgrp == leader) continue;
        for (size_t at = m.at; at < m.length; at += strlen(m.fields + at) + 1) kept |= atoi(m.fields + at) == pgrp;
        if (!kept) kill(-pgrp, number);
    }
    if (all) closedir(all);
}

/* Fields: a command's id, a signal, `group` or `session`, and the process groups that stay. */
static void end(void) {
    uint32_t id = (uint32_t)wire_number(&m);
    int number = (int)wire_number(&m), session = *wire_text(&m) == 's';
    pid_t leader = 0;
    for (int i = 0; i < MOST_COMMANDS; i++)
        if (commands[i].pid && commands[i].id == id) leader = commands[i].pid;
    if (leader && session) end_session(leader, number);
    else if (leader && kill(-leader, number)) kill(leader, number);   /* it has no group yet */
    wire_send(control, 'K', m.id, NULL, 0, NULL, 0);
}

static void reap(int signals) {
    struct signalfd_siginfo skipped[32];
    while (read(signals, skipped, sizeof skipped) > 0) {}
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < MOST_COMMANDS; i++)
            if (commands[i].pid == pid) {
                commands[i].pid = 0;
                wire_say(control, 'X', commands[i].id, "%d", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
            }
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

/* Fields: a port. The answer has a socket that listens there, on the sandbox's loopback. */
static void listen_at(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)wire_number(&m)), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (s < 0 || bind(s, (struct sockaddr *)&address, sizeof address) || listen(s, 128)) refuse("listening");
    else wire_send(control, 'L', m.id, NULL, 0, &s, 1);
    if (s >= 0) close(s);
}

void sandbox_main(struct sandbox *sandbox) {
    char byte;
    sigset_t child;
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
    sigemptyset(&child), sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    struct pollfd waiting[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
    wire_send(control, 'O', 0, NULL, 0, NULL, 0);
    for (;;) {
        if (poll(waiting, 2, -1) < 0 && errno != EINTR) _exit(1);
        if (waiting[1].revents) reap(signals);
        if (!waiting[0].revents) continue;
        if (wire_receive(control, &m) <= 0) _exit(0);
        switch (m.op) {
            case 'R': run(); break;
            case 'W': case 'G': move_files(); break;
            case 'K': end(); break;
            case 'N': snapshot(signals); break;
            case 'L': listen_at(); break;
        }
        wire_close_fds(&m);
    }
}
