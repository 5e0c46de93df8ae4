/* The program that a container's sandbox consists of.
 *
 *     resident init SECONDS_UNOWNED SECONDS_TO_LIVE PTRACE    the container's first process: runs commands, and ends the container
 *     resident relay                                          joins a client, by its standard streams, with the first process
 *
 * The first process listens at an abstract address and takes one client, a relay, which it knows by its user: no command can become
 * that one. Without a client it waits SECONDS_UNOWNED; SECONDS_TO_LIVE of 0 is no limit. Beside the requests of `commands.h` it serves
 * `N`: does no command run? `T`: the seconds to live from now. `P`: keep a command's pipes for the next client. */
#define _GNU_SOURCE
#include "commands.h"
#include "relay.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define OURS 65533   /* the user of both processes: commands can neither be it nor signal or trace it */

static pid_t relay_pid;
static struct { char text[64], pipes[WIRE_FDS + 1]; int fds[WIRE_FDS], n; } kept;

static int address_of(const char *name, struct sockaddr_un *address) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    strcpy(address->sun_path + 1, name);
    return (int)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static int listen_on(const char *name) {
    struct sockaddr_un address;
    int length = address_of(name, &address), s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    must(bind(s, (struct sockaddr *)&address, (socklen_t)length), name);
    must(listen(s, 8), name);
    return s;
}

static int connect_to(const char *name) {
    struct sockaddr_un address;
    int length = address_of(name, &address), s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (!connect(s, (struct sockaddr *)&address, (socklen_t)length)) return s;
    close(s);
    return -1;
}

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static void end_of_life(int number) {
    (void)number;
    _exit(0);
}

static void live(double seconds) {
    struct itimerval timer = {.it_value = {(time_t)seconds, (suseconds_t)((seconds - (double)(time_t)seconds) * 1e6)}};
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* Two relays must not read the same pipes: the earlier one has ended when this returns. */
static void dismiss_client(void) {
    struct timeval patience = {5, 0};
    setsockopt(control, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    shutdown(control, SHUT_WR);
    if (relay_pid > 1) kill(relay_pid, SIGKILL);   /* it may be stopped */
    while (wire_receive(control, &m, 0) > 0) wire_close_fds(&m);
    close(control);
}

static void take_client(int listening) {
    int s = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    if (s < 0) return;
    if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &size) || peer.uid != OURS) {
        close(s);
        return;
    }
    struct timeval patience = {5, 0};   /* a client that does not read must not stop this process */
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (control >= 0) dismiss_client();
    control = s, relay_pid = peer.pid;
    char fields[sizeof kept];
    int length = snprintf(fields, sizeof fields, "%s%c%s", kept.text, 0, kept.pipes) + 1;
    wire_send(control, 'O', 0, fields, (size_t)length, kept.fds, kept.n);
}

/* Fields: what the client calls the command, and the letters of its pipes. Descriptors: the pipes. */
static void keep(void) {
    while (kept.n) close(kept.fds[--kept.n]);
    snprintf(kept.text, sizeof kept.text, "%s", wire_text(&m));
    snprintf(kept.pipes, sizeof kept.pipes, "%s", wire_text(&m));
    while (kept.n < m.n_fds) kept.fds[kept.n] = fcntl(m.fds[kept.n], F_DUPFD_CLOEXEC, 0), kept.n++;
    wire_send(control, 'P', m.id, NULL, 0, NULL, 0);
}

/* Relays have no parent in here. */
static int commands_run(void) {
    DIR *all = opendir("/proc");
    int found = 0;
    for (struct dirent *d; all && (d = readdir(all));) {
        int parent, group, session;
        found |= process_stat(d->d_name, &parent, &group, &session) && parent != 0;
    }
    if (all) closedir(all);
    return found;
}

/* Processes that were killed a moment ago get a moment to end. */
static void answer_still(int signals) {
    struct pollfd ended = {signals, POLLIN, 0};
    while (commands_run() && poll(&ended, 1, 200) > 0) reap(signals);
    errno = EBUSY;
    if (commands_run()) refuse("processes are still running");
    else wire_send(control, 'N', m.id, NULL, 0, NULL, 0);
}

/* Root of the container, without its rights, could write to files of /proc/1 if this process were root's. */
static void leave_root(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct rights[2];
    must(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keeping rights");
    must(setgroups(0, NULL), "no groups");
    must(setresgid(OURS, OURS, OURS), "a group of its own");
    must(setresuid(OURS, OURS, OURS), "a user of its own");
    must(syscall(SYS_capget, &head, rights), "its rights");
    for (int i = 0; i < 2; i++) rights[i].effective = rights[i].permitted;
    must(syscall(SYS_capset, &head, rights), "its rights");
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);   /* else its files in /proc are root's */
}

static void init(double seconds_unowned, double seconds_to_live) {
    long long patience = (long long)(seconds_unowned * 1000);
    leave_root(), reserved_user = OURS;
    prctl(PR_SET_NAME, "sandbox", 0, 0, 0);
    for (int fd = 0; fd < 3; fd++) close(fd), open("/dev/null", O_RDWR);
    signal(SIGALRM, end_of_life);
    live(seconds_to_live);
    int signals = command_signals(), listening = listen_on("goaly");
    close(connect_to("goaly-waits"));   /* a relay that came before this process */
    long long until = now() + patience;
    for (;;) {
        struct pollfd waiting[3] = {{signals, POLLIN, 0}, {listening, POLLIN, 0}, {control, POLLIN, 0}};
        long long left = until - now();
        if (control < 0 && left <= 0) _exit(0);
        if (poll(waiting, 3, control < 0 ? (int)(left < 1 << 30 ? left : 1 << 30) : -1) < 0) continue;
        if (waiting[0].revents) reap(signals);
        if (waiting[2].revents) {
            if (wire_receive(control, &m, 0) <= 0) close(control), control = -1, relay_pid = 0, until = now() + patience;
            else if (m.op == 'N') answer_still(signals);
            else if (m.op == 'P') keep();
            else if (m.op == 'T') live(atof(wire_text(&m))), wire_send(control, 'T', m.id, NULL, 0, NULL, 0);
            else serve_request();
            wire_close_fds(&m);
        }
        if (waiting[1].revents) take_client(listening);
    }
}

static int joined(void) {
    int s = connect_to("goaly"), waiting;
    if (s >= 0) return s;
    waiting = listen_on("goaly-waits");   /* the first process says when it listens */
    s = connect_to("goaly");
    if (s < 0) close(accept(waiting, NULL, NULL)), s = connect_to("goaly");
    close(waiting);
    must(s, "the sandbox's first process");
    return s;
}

int main(int n, char **words) {
    if (n == 5 && !strcmp(words[1], "init")) debuggable = atoi(words[4]), init(atof(words[2]), atof(words[3]));
    if (n == 2 && !strcmp(words[1], "relay")) relay(joined());
    return 2;
}
