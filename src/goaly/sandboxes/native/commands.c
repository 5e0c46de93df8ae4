/* Commands, files and sockets of a sandbox, by the process that is its PID 1: `commands.h`. */
#define _GNU_SOURCE
#include "commands.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_COMMANDS 1024
#define MOST_WORDS 4096

void files_write(int from, const char *folder);
void files_read(int to, const char *path);

struct message m;
int control = -1, debuggable;
uid_t reserved_user = (uid_t)-1;
char command_root[32];
static struct { uint32_t id; pid_t pid; } commands[MOST_COMMANDS];

void fail(const char *doing) {
    if (control < 0) perror(doing);
    else wire_say(control, 'E', 0, "%s: %s", doing, strerror(errno));
    _exit(1);
}

void must(long result, const char *doing) {
    if (result < 0) fail(doing);
}

/* Answers a request with an error: its number and what it is about. */
void refuse(const char *what) {
    int number = errno;
    char fields[4200];
    int length = snprintf(fields, sizeof fields, "%d%c%.4000s", number, 0, what);
    wire_send(control, 'F', m.id, fields, (size_t)length + 1, NULL, 0);
    errno = number;
}

/* What a command's process does before its program, or a file operation: no way back. */
static void become(uid_t uid, gid_t gid) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    if (*command_root) must(chroot(command_root), "the sandbox's root");
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
    for (int number = 1; number <= SIGRTMAX; number++) signal(number, SIG_DFL);   /* the server ignores some */
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

/* A process for a command. Signals wait until it takes them as a command does. */
static pid_t fork_for_a_command(void) {
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    pid_t pid = room_for_a_command() ? fork() : -1;
    if (pid) sigprocmask(SIG_SETMASK, &before, NULL);
    return pid;
}

/* Fields: user, group, folder, number of limits, (resource, value) each, number of words, words, variables. Descriptors: the program's, from 0. */
static void run(void) {
    pid_t pid = fork_for_a_command();
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
    syscall(SYS_close_range, (unsigned)m.n_fds, ~0u, 1 << 2 /* CLOSE_RANGE_CLOEXEC */);   /* not every C library has it */
    control = report;
    if (uid == reserved_user) dprintf(2, "user %u is reserved\n", uid), _exit(126);
    become(uid, gid);
    if (chdir(folder)) dprintf(2, "%s: %s\n", folder, strerror(errno)), _exit(126);
    for (int i = 0; i < n_limits && i < 16; i++) setrlimit(resources[i], &limits[i]);
    execvpe(words[0], words, variables);
    dprintf(2, "%s: %s\n", words[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

/* Fields: user, group, path. Descriptor: where the files come from (`W`) or go to (`G`). */
static void move_files(void) {
    pid_t pid = fork_for_a_command();
    if (pid) {
        answer_started(pid);
        return;
    }
    uid_t uid = (uid_t)wire_number(&m);
    gid_t gid = (gid_t)wire_number(&m);
    const char *path = wire_text(&m);
    errno = EPERM;
    if (uid == reserved_user) refuse("a reserved user"), _exit(1);
    become(uid, gid);
    errno = 0;
    if (m.op == 'W') files_write(m.fds[0], path);
    else files_read(m.fds[0], path);
    if (errno) refuse(path);
    _exit(errno ? 1 : 0);
}

int process_stat(const char *name, int *parent, int *group, int *session) {
    char path[300], text[512];
    if (*name < '0' || *name > '9') return 0;
    snprintf(path, sizeof path, "/proc/%s/stat", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *after = strrchr(text, ')');   /* a program's name may have blanks and brackets */
    return after && sscanf(after + 1, " %*c %d %d %d", parent, group, session) == 3;
}

/* Sends a signal to all process groups of a session but the leader's and those in the message. */
static void end_session(pid_t leader, int number) {
    DIR *all = opendir("/proc");
    for (struct dirent *d; all && (d = readdir(all));) {
        int parent, pgrp, session, kept = 0;
        if (!process_stat(d->d_name, &parent, &pgrp, &session) || session != leader || pgrp == leader) continue;
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
    if (!leader) wire_say(control, 'X', id, "255");   /* an earlier owner may have read its end */
    wire_send(control, 'K', m.id, NULL, 0, NULL, 0);
}

/* How often the kernel has killed a process because the control group's memory was used up, if this process can see that. */
static long memory_kills(void) {
    static const char *paths[] = {"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"};
    char text[1024];
    for (int i = 0; i < 2; i++) {
        int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        text[n < 0 ? 0 : n] = 0;
        const char *found = strstr(text, "oom_kill ");
        return found ? atol(found + 9) : 0;
    }
    return 0;
}

void reap(int signals) {
    struct signalfd_siginfo skipped[32];
    while (read(signals, skipped, sizeof skipped) > 0) {}
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < MOST_COMMANDS; i++)
            if (commands[i].pid == pid) {
                commands[i].pid = 0;
                int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
                wire_say(control, 'X', commands[i].id, "%d%c%ld", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), 0, killed ? memory_kills() : 0);
            }
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

int command_signals(void) {
    sigset_t child;
    sigemptyset(&child), sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    return signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
}

void serve_request(void) {
    switch (m.op) {
        case 'R': run(); break;
        case 'W': case 'G': move_files(); break;
        case 'K': end(); break;
        case 'L': listen_at(); break;
    }
}
