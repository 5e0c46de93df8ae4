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
#include "layers.h"
#include "starter.h"

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
#define MOST_LABELS 4096
#define MOST_CLIENTS 1024
#define MOST_STARTERS 8

/* Times are milliseconds; 0 is never. `until`: when it ends unless a client attaches; `end`: when it ends anyway. */
struct box {
    uint32_t id, born;
    pid_t pid;          /* 0 until its starter has told it */
    int ended, host_end, client, n_groups, n_kept, kept[WIRE_FDS];
    long long began, keep, until, end;
    char command[64], *labels, *groups[MOST_GROUPS];
};

struct client { int fd; uint32_t number; };

static struct box boxes[MOST];
static uint32_t ids[MOST];   /* of the boxes: quick to look through */
static struct { pid_t pid; int socket; } starters[MOST_STARTERS];
static struct client clients[MOST_CLIENTS];
static int n_boxes, n_clients, n_starters, first_id, poller, home;
static uint32_t last_client, last_start;
static const char *folder;
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

static struct box *find(uint32_t id) {
    for (int i = 0; i < n_boxes; i++)
        if (ids[i] == id) return &boxes[i];
    return NULL;
}

static uint32_t number_of(int client) {
    for (int i = 0; i < n_clients; i++)
        if (clients[i].fd == client) return clients[i].number;
    return 0;
}

/* They stay as long as the client that brought them, or a sandbox that it started: an adopter may fork that. */
static void forget_layers_of(uint32_t born) {
    for (int i = 0; i < n_clients; i++)
        if (clients[i].number == born) return;
    for (int i = 0; i < n_boxes; i++)
        if (boxes[i].born == born) return;
    layers_forget_of(born);
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

/* Fields: those of `assign`, then those of `struct start`. The answer comes from a starter. */
static void start(int client) {
    static struct start request;
    struct box *box = &boxes[n_boxes];
    int pair[2];
    *box = (struct box){.id = m.id, .born = number_of(client), .client = client, .began = now()};
    assign(box);
    size_t begin = m.at;
    int valid = !start_read(&request, &m);
    errno = n_boxes == MOST - 1 ? EMFILE : !valid ? EINVAL : find(m.id) ? EEXIST : 0;
    if (errno || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) {
        refuse(client, "a sandbox");
        free(box->labels);
        return;
    }
    box->keep = request.keep, box->host_end = pair[0], box->n_groups = request.n_groups;
    for (int i = 0; i < request.n_groups; i++) box->groups[i] = strdup(request.groups[i]);
    ids[n_boxes++] = m.id;
    int starter = starters[last_start++ % (unsigned)n_starters].socket;
    wire_send(starter, 'S', m.id, m.fields + begin, m.length - begin, &pair[1], 1);   /* its death is the end of all */
    close(pair[1]);
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

static void end_box(struct box *box) {
    uint32_t born = box->born;
    drop_kept(box);
    while (box->n_groups) rmdir(box->groups[--box->n_groups]), free(box->groups[box->n_groups]);
    close(box->host_end), free(box->labels);
    *box = boxes[--n_boxes], ids[box - boxes] = ids[n_boxes];
    forget_layers_of(born);
}

static void report_end(struct box *box, int code) {
    if (box->client >= 0) wire_say(box->client, 'X', box->id, "%d", code);
    end_box(box);
}

/* A starter's answer. */
static void started(void) {
    struct box *box = find(m.id);
    const char *pid = wire_text(&m), *failed = wire_text(&m);
    box->pid = atoi(pid);
    if (*failed) wire_send(box->client, 'E', m.id, failed, strlen(failed) + 1, NULL, 0), box->client = -1;
    else wire_send(box->client, 'S', m.id, pid, strlen(pid) + 1, &box->host_end, 1);
    if (!box->pid || kill(box->pid, 0)) report_end(box, -SIGKILL);   /* it was killed, and nobody knew whose it was */
    else if (box->ended) kill(box->pid, SIGKILL);
}

/* As soon as it has a process. */
static void kill_box(struct box *box) {
    if (box->pid) kill(box->pid, SIGKILL);
    else box->ended = 1;
}

/* Its owner may have been killed: nobody else removes its folder. One of the same name may be a successor's. */
static void leave_nothing(void) {
    char path[1024];
    if (chdir("/") || umount2(folder, MNT_DETACH)) exit(1);
    unlinkat(home, "server", 0), unlinkat(home, "mounts", AT_REMOVEDIR);
    snprintf(path, sizeof path, "%.*s", (int)(strrchr(folder, '/') - folder), folder), rmdir(path);
    exit(0);
}

/* A process of which no starter has told ends by itself, because nobody lets it go on. */
static void end_all(void) {
    for (int i = 0; i < n_starters; i++) kill(starters[i].pid, SIGKILL);
    for (int i = 0; i < n_boxes; i++)
        if (boxes[i].pid) kill(boxes[i].pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0) {}
    while (n_boxes) end_box(&boxes[n_boxes - 1]);
    leave_nothing();
}

static void reap(int signals) {
    struct signalfd_siginfo skipped[64];
    while (read(signals, skipped, sizeof skipped) > 0) {}
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        for (int i = 0; i < n_starters; i++)
            if (starters[i].pid == pid) end_all();
        for (int i = 0; i < n_boxes; i++)
            if (boxes[i].pid == pid) {
                report_end(&boxes[i], WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
                break;
            }
    }
}

/* Fields: a name, and for an image its folder. Descriptor: a snapshot's layer. */
static void add_layer(int client) {
    const char *name = wire_text(&m), *path = m.op == 'I' ? wire_text(&m) : NULL;
    int snapshot = m.n_fds ? m.fds[0] : -1;
    if (layer_add(name, path, snapshot, number_of(client), first_id)) refuse(client, path ? path : name);
    else wire_send(client, m.op, m.id, NULL, 0, NULL, 0);
}

static void forget_layer(int client) {
    const char *name = wire_text(&m);
    if (layer_forget(name)) refuse(client, name);
    else wire_send(client, 'Z', m.id, NULL, 0, NULL, 0);
}

/* Answers: one for each sandbox, with its pid, its age in seconds, `owned` or `left`, and its labels; then one without fields. */
static void list(int client) {
    char text[MOST_LABELS + 64];
    for (int i = 0; i < n_boxes; i++) {
        struct box *box = &boxes[i];
        if (!box->pid) continue;
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
            else kill_box(box), box->client = client;
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
    epoll_ctl(poller, EPOLL_CTL_DEL, client, NULL);   /* a child may have a copy, with which it would go on to be reported */
    close(client);
}

/* Ends those whose time is over. */
static int milliseconds_to_the_next_end(void) {
    long long t = now();
    if (next_end && next_end <= t) {
        next_end = 0;
        for (int i = 0; i < n_boxes; i++) {
            struct box *box = &boxes[i];
            if ((box->until && box->until <= t) || (box->end && box->end <= t)) kill_box(box);
            else end_by(box->until), end_by(box->end);
        }
    }
    return !next_end ? -1 : next_end - t > 1 << 30 ? 1 << 30 : (int)(next_end - t);
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

static int is_starter(int fd) {
    for (int i = 0; i < n_starters; i++)
        if (starters[i].socket == fd) return 1;
    return 0;
}

static void make_starters(void) {
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    while (n_starters < (cores < MOST_STARTERS ? cores : MOST_STARTERS)) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) perror("a starter"), exit(1);
        pid_t pid = fork();
        if (!pid) {
            if (pair[1] != 3) dup3(pair[1], 3, O_CLOEXEC);
            close_range(4, ~0u, 0);
            starter_main(3, first_id);
        }
        close(pair[1]);
        starters[n_starters].pid = pid, starters[n_starters++].socket = pair[0];
    }
}

int main(int n, char **words) {
    if (n != 5) return 2;
    int listening = atoi(words[1]), owner = atoi(words[2]);
    first_id = atoi(words[4]);
    folder = words[3];
    if (first_id < 0) become_root_of_a_namespace();
    if (!chdir(folder)) home = open("..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
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
    make_starters();
    poller = epoll_create1(EPOLL_CLOEXEC);
    watch(listening), watch(signals);
    for (int i = 0; i < n_starters; i++) watch(starters[i].socket);
    if (owner >= 0) watch(owner);
    for (;;) {
        struct epoll_event events[64];
        int ready = epoll_wait(poller, events, 64, milliseconds_to_the_next_end());
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == owner) end_all();
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
                if (!got) is_starter(fd) ? end_all() : leave(fd);
                else if (got > 0) is_starter(fd) ? started() : serve(fd), wire_close_fds(&m);
            }
        }
        if (owner < 0 && last_client && !n_clients && !n_boxes) leave_nothing();
    }
}
