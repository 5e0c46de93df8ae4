/* Starts sandboxes, knows which live, and removes all of them when its owner ends.
 *
 *     sandboxes LISTEN OWNER FOLDER FIRST_ID
 *
 * LISTEN is a descriptor of a listening socket (SOCK_SEQPACKET), OWNER one that is readable when the owner is gone, or -1: it ends
 * when it has neither clients nor sandboxes, FOLDER an empty folder for mounts beside its socket, which is named `server`, FIRST_ID
 * the host's user that is root in every sandbox, or -1: the server's own user.
 *
 * Requests: `H` the client's number and the server's pid, `S` start, `A` attach, `K` keep a command's pipes for who attaches next,
 * `B` assign to another use, `T` terminate, `Q` list, `I` an image's folder, `Y` a layer of a snapshot, `Z` forget either. Answers have the request's operation or `E`, and its id; `X` reports the
 * end of a sandbox to the client that has it. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 16384
#define MOST_GROUPS 8
#define MOST_HIDDEN 64
#define MOST_LABELS 4096
#define IDS 65536
#define MOST_CLIENTS 1024

/* Times are milliseconds; 0 is never. `until`: when it ends unless a client attaches; `end`: when it ends anyway. */
struct box {
    uint32_t id, born;
    pid_t pid;
    int host_end, client, n_groups, n_kept, kept[WIRE_FDS];
    long long began, keep, until, end;
    char command[64], *labels, *groups[MOST_GROUPS];
};

/* Layers stay as long as the client that brought them, or a sandbox that it started: an adopter may fork that. */
struct layer { char name[96]; uint32_t born; };
struct client { int fd; uint32_t number; };

static struct box boxes[MOST];
static struct layer layers[MOST];
static struct client clients[MOST_CLIENTS];
static int n_boxes, n_layers, n_clients, first_id, poller, users = -1;
static uint32_t last_client;
static long long next_end;   /* no sandbox's time is over before; 0 if none's will be */
static struct message m;

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static void end_by(long long when) {
    if (when && (!next_end || when < next_end)) next_end = when;
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) {
        int kept = errno;
        if (fd >= 0) close(fd);
        errno = kept;
        return;
    }
    close(fd);
    errno = 0;
}

static void map_ids(pid_t pid) {
    char path[64], map[64];
    snprintf(map, sizeof map, "0 %d %d", first_id < 0 ? 0 : first_id, first_id < 0 ? 1 : IDS);
    if (first_id < 0) snprintf(path, sizeof path, "/proc/%d/setgroups", pid), write_file(path, "deny");
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid), write_file(path, map);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid), write_file(path, map);
}

static struct box *find(uint32_t id) {
    for (int i = 0; i < n_boxes; i++)
        if (boxes[i].id == id) return &boxes[i];
    return NULL;
}

static uint32_t number_of(int client) {
    for (int i = 0; i < n_clients; i++)
        if (clients[i].fd == client) return clients[i].number;
    return 0;
}

static int forget(int at) {
    char path[128];
    snprintf(path, sizeof path, "../layers/%s", layers[at].name);
    layers[at] = layers[--n_layers];
    return umount2(path, MNT_DETACH) || rmdir(path);
}

static void forget_layers_of(uint32_t born) {
    for (int i = 0; i < n_clients; i++)
        if (clients[i].number == born) return;
    for (int i = 0; i < n_boxes; i++)
        if (boxes[i].born == born) return;
    for (int i = n_layers; i-- > 0;)
        if (layers[i].born == born) forget(i);
}

static void refuse(int client, const char *what) {
    wire_say(client, 'E', m.id, "%s: %s", what, strerror(errno));
}

/* Fields: milliseconds to live (0: no limit), labels. */
static void assign(struct box *box) {
    long long live = wire_number(&m);
    box->end = live ? now() + live : 0;
    end_by(box->end);
    free(box->labels);
    box->labels = strndup(wire_text(&m), MOST_LABELS);
}

/* Fields: those of `assign`, name, bytes, files, milliseconds without a client, ptrace, number of layers, layers (names of `I` and `Y`), number of hidden folders,
 * hidden folders, then control groups: a folder to make, and `file=value` for the folder before it. Answer: pid, with the client's end of the sandbox's socket. */
static void start(int client) {
    static const char *folders[512], *hidden[MOST_HIDDEN];
    static char paths[512][128];
    struct box box = {.id = m.id, .born = number_of(client), .client = client, .began = now()};
    struct sandbox sandbox = {.folder = "../here", .layers = folders};
    int pair[2], go[2];
    assign(&box);
    sandbox.hostname = wire_text(&m), sandbox.bytes = wire_text(&m), sandbox.inodes = wire_text(&m);
    box.keep = wire_number(&m);
    sandbox.debuggable = (int)wire_number(&m), sandbox.n_layers = (int)wire_number(&m);
    for (int i = 0; i < sandbox.n_layers && i < 512; i++) {
        const char *name = wire_text(&m);
        if (strchr(name, '/') || *name == '.') sandbox.n_layers = -1;
        snprintf(paths[i], sizeof paths[i], "../layers/%s", name), folders[i] = paths[i];
    }
    sandbox.hidden = hidden, sandbox.n_hidden = (int)wire_number(&m);
    for (int i = 0; i < sandbox.n_hidden && i < MOST_HIDDEN; i++) hidden[i] = wire_text(&m);
    if (sandbox.n_hidden > MOST_HIDDEN) sandbox.n_layers = -1;
    errno = n_boxes == MOST ? EMFILE : sandbox.n_layers < 1 || sandbox.n_layers > 399 ? EINVAL : find(m.id) ? EEXIST : 0;
    if (errno || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) || pipe2(go, O_CLOEXEC)) {
        refuse(client, "a sandbox");
        free(box.labels);
        return;
    }
    sandbox.control = pair[1], sandbox.go = go[0];
    box.host_end = pair[0];
    box.pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | SIGCHLD, 0, 0, 0, 0);
    if (box.pid == 0) {
        close(go[1]);
        sandbox_main(&sandbox);
    }
    close(pair[1]), close(go[0]);
    if (box.pid < 0) {
        refuse(client, "a process");
        close(pair[0]), close(go[1]), free(box.labels);
        return;
    }
    map_ids(box.pid);
    char path[1024], pid[16];
    snprintf(pid, sizeof pid, "%d", box.pid);
    const char *failed = errno ? "the map of users" : NULL;
    while (!failed && m.at < m.length && box.n_groups < MOST_GROUPS) {
        const char *text = wire_text(&m), *value = strchr(text, '=');
        if (*text == '/') {
            if (mkdir(text, 0755) && errno != EEXIST) failed = text;
            else box.groups[box.n_groups++] = strdup(text);
        } else if (value && box.n_groups) {
            snprintf(path, sizeof path, "%s/%.*s", box.groups[box.n_groups - 1], (int)(value - text), text);
            write_file(path, value + 1);
            if (errno) failed = path;
        }
    }
    for (int i = 0; !failed && i < box.n_groups; i++) {
        snprintf(path, sizeof path, "%s/cgroup.procs", box.groups[i]);
        write_file(path, pid);
        if (errno) failed = path;
    }
    if (failed) refuse(client, failed), kill(box.pid, SIGKILL);
    else if (write(go[1], "", 1) == 1) wire_send(client, 'S', m.id, pid, strlen(pid) + 1, &pair[0], 1);
    close(go[1]);
    boxes[n_boxes++] = box;
}

static void drop_kept(struct box *box) {
    while (box->n_kept) close(box->kept[--box->n_kept]);
}

/* Field: what the client calls the command. Descriptors: its pipes, at most one fewer than fit into a message. */
static void keep(struct box *box) {
    drop_kept(box);
    snprintf(box->command, sizeof box->command, "%s", wire_text(&m));
    for (int i = 0; i < m.n_fds && i < WIRE_FDS - 1; i++) box->kept[box->n_kept++] = fcntl(m.fds[i], F_DUPFD_CLOEXEC, 0);
}

static void attach(struct box *box, int client) {
    int fds[WIRE_FDS] = {box->host_end};
    memcpy(fds + 1, box->kept, sizeof(int) * (size_t)box->n_kept);
    box->client = client, box->until = 0;
    wire_send(client, 'A', m.id, box->command, strlen(box->command) + 1, fds, box->n_kept + 1);
}

static void end_box(int at) {
    struct box *box = &boxes[at];
    drop_kept(box);
    while (box->n_groups) rmdir(box->groups[--box->n_groups]), free(box->groups[box->n_groups]);
    close(box->host_end), free(box->labels);
    uint32_t born = box->born;
    *box = boxes[--n_boxes];
    forget_layers_of(born);
}

static void reap(int signals) {
    struct signalfd_siginfo skipped[64];
    while (read(signals, skipped, sizeof skipped) > 0) {}
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < n_boxes; i++)
            if (boxes[i].pid == pid) {
                if (boxes[i].client >= 0) wire_say(boxes[i].client, 'X', boxes[i].id, "%d", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
                end_box(i);
                break;
            }
}

/* A folder with the sandboxes' users: user 0 of its files is root inside. */
static int mapped(int tree) {
    if (first_id < 0) return 0;
    if (users < 0) {
        pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
        if (!pid) pause();
        map_ids(pid);
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
        users = open(path, O_RDONLY | O_CLOEXEC);
        kill(pid, SIGKILL);
        if (users < 0) return -1;
    }
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)users};
    return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes);
}

/* Fields: a name, and for an image its folder. Descriptor: a snapshot's layer. */
static void add_layer(int client) {
    char at[128];
    const char *name = wire_text(&m), *path = wire_text(&m);
    snprintf(at, sizeof at, "../layers/%s", name);
    if (strchr(name, '/') || *name == '.' || strlen(name) >= sizeof layers->name || (m.op == 'Y' && !m.n_fds) || n_layers == MOST) {
        errno = n_layers == MOST ? EMFILE : EINVAL;
        refuse(client, name);
        return;
    }
    int tree = m.op == 'Y' ? m.fds[0] : (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (first_id < 0 ? AT_RECURSIVE : 0));
    if (tree < 0 || (m.op == 'I' && mapped(tree)) || (mkdir(at, 0755) && errno != EEXIST) || syscall(SYS_move_mount, tree, "", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH))
        refuse(client, m.op == 'I' ? path : name);
    else {
        layers[n_layers].born = number_of(client);
        strcpy(layers[n_layers++].name, name);
        wire_send(client, m.op, m.id, NULL, 0, NULL, 0);
    }
    if (m.op == 'I' && tree >= 0) close(tree);
}

static void forget_layer(int client) {
    const char *name = wire_text(&m);
    int at = 0;
    while (at < n_layers && strcmp(layers[at].name, name)) at++;
    errno = ENOENT;
    if (at == n_layers || forget(at)) refuse(client, name);
    else wire_send(client, 'Z', m.id, NULL, 0, NULL, 0);
}

/* Answers: one for each sandbox, with its pid, its age in seconds, `owned` or `left`, and its labels; then one without fields. */
static void list(int client) {
    char text[MOST_LABELS + 64];
    for (int i = 0; i < n_boxes; i++) {
        struct box *box = &boxes[i];
        const char *owned = box->client < 0 ? "left" : "owned";
        int length = snprintf(text, sizeof text, "%d%c%lld%c%s%c%s", box->pid, 0, (now() - box->began) / 1000, 0, owned, 0, box->labels);
        wire_send(client, 'Q', m.id, text, (size_t)length + 1, NULL, 0);
    }
    wire_send(client, 'Q', m.id, NULL, 0, NULL, 0);
}

static void serve(int client) {
    struct box *box = find(m.id);
    switch (m.op) {
        case 'H': wire_say(client, 'H', m.id, "%u%c%d", number_of(client), 0, getpid()); break;
        case 'S': start(client); break;
        case 'I': case 'Y': add_layer(client); break;
        case 'Z': forget_layer(client); break;
        case 'A':
            errno = ESRCH;
            if (!box) refuse(client, "the sandbox");
            else attach(box, client);
            break;
        case 'K':
            errno = ESRCH;
            if (!box) refuse(client, "the sandbox");
            else keep(box), wire_send(client, 'K', m.id, NULL, 0, NULL, 0);
            break;
        case 'B':
            errno = ESRCH;
            if (!box) refuse(client, "the sandbox");
            else assign(box), wire_send(client, 'B', m.id, NULL, 0, NULL, 0);
            break;
        case 'Q': list(client); break;
        case 'T':
            errno = ESRCH;
            if (!box) refuse(client, "the sandbox");
            else kill(box->pid, SIGKILL), box->client = client;
            break;
    }
}

/* Nobody has a client's sandboxes any more: they live on for a while, so another one can attach. */
static void leave(int client) {
    for (int i = 0; i < n_boxes; i++)
        if (boxes[i].client == client) boxes[i].client = -1, boxes[i].until = now() + boxes[i].keep, end_by(boxes[i].until);
    for (int i = 0; i < n_clients; i++)
        if (clients[i].fd == client) {
            uint32_t number = clients[i].number;
            clients[i] = clients[--n_clients];
            forget_layers_of(number);
            break;
        }
    epoll_ctl(poller, EPOLL_CTL_DEL, client, NULL);   /* a sandbox that has just been cloned may still hold it open */
    close(client);
}

/* Ends those whose time is over. */
static int milliseconds_to_the_next_end(void) {
    long long t = now();
    if (next_end && next_end <= t) {
        next_end = 0;
        for (int i = 0; i < n_boxes; i++) {
            struct box *box = &boxes[i];
            if ((box->until && box->until <= t) || (box->end && box->end <= t)) kill(box->pid, SIGKILL);
            else end_by(box->until), end_by(box->end);
        }
    }
    return !next_end ? -1 : next_end - t > 1 << 30 ? 1 << 30 : (int)(next_end - t);
}

/* Its owner may have been killed: nobody else removes its folder. */
static void leave_nothing(const char *folder) {
    char path[1024];
    if (chdir("/") || umount2(folder, MNT_DETACH)) exit(1);
    snprintf(path, sizeof path, "%s/../server", folder), unlink(path);
    snprintf(path, sizeof path, "%.*s", (int)(strrchr(folder, '/') - folder), folder);
    rmdir(folder), rmdir(path);
    exit(0);
}

static void end_all(const char *folder) {
    for (int i = 0; i < n_boxes; i++) kill(boxes[i].pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0) {}
    while (n_boxes) end_box(n_boxes - 1);
    leave_nothing(folder);
}

static void watch(int fd) {
    struct epoll_event event = {EPOLLIN, {.fd = fd}};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event)) exit(1);
}

static void become_root_of_a_namespace(void) {
    char map[64];
    uid_t uid = getuid();
    gid_t gid = getgid();
    if (unshare(CLONE_NEWUSER)) perror("a namespace of users"), exit(1);
    write_file("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "0 %u 1", gid), write_file("/proc/self/gid_map", map);
    snprintf(map, sizeof map, "0 %u 1", uid), write_file("/proc/self/uid_map", map);
}

int main(int n, char **words) {
    if (n != 5) return 2;
    int listening = atoi(words[1]), owner = atoi(words[2]);
    first_id = atoi(words[4]);
    const char *folder = words[3];
    if (first_id < 0) become_root_of_a_namespace();
    prctl(PR_SET_NAME, "sandboxes", 0, 0, 0);
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("sandboxes", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        || chdir(folder) || mkdir("here", 0755) || mkdir("layers", 0755) || chdir("here")) {
        perror("mounts of its own");
        return 1;
    }
    sigset_t child;
    sigemptyset(&child), sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    for (int number = 1; number < 32; number++)
        if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGPIPE) signal(number, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    watch(listening), watch(signals);
    if (owner >= 0) watch(owner);
    for (;;) {
        struct epoll_event events[64];
        int ready = epoll_wait(poller, events, 64, milliseconds_to_the_next_end());
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == owner) end_all(folder);
            else if (fd == signals) reap(signals);
            else if (fd == listening) {
                int client = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
                struct timeval patience = {5, 0};   /* a client that does not read must not stop the others */
                if (client >= 0 && n_clients == MOST_CLIENTS) close(client);
                else if (client >= 0) {
                    setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience), watch(client);
                    clients[n_clients++] = (struct client){client, ++last_client};
                }
            } else {
                int got = wire_receive(fd, &m, MSG_DONTWAIT);
                if (!got) leave(fd);
                else if (got > 0) serve(fd), wire_close_fds(&m);
            }
        }
        if (owner < 0 && last_client && !n_clients && !n_boxes) leave_nothing(folder);
    }
}
