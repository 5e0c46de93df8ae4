/* One starter a core: each holds no more than it needs, so a sandbox costs the same however many the server has already. A server that
 * forked sandboxes itself would copy its table of files for each, which has entries for all others. */
#define _GNU_SOURCE
#include "starter.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define IDS 65536

static struct message m;
static struct start request;

void write_file(const char *path, const char *text) {
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

void map_ids(pid_t pid, int first_id) {
    char path[64], map[64];
    snprintf(map, sizeof map, "0 %d %d", first_id < 0 ? 0 : first_id, first_id < 0 ? 1 : IDS);
    if (first_id < 0) snprintf(path, sizeof path, "/proc/%d/setgroups", pid), write_file(path, "deny");
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid), write_file(path, map);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid), write_file(path, map);
}

int start_read(struct start *start, struct message *m) {
    struct sandbox *sandbox = &start->sandbox;
    *sandbox = (struct sandbox){.folder = "../here", .layers = start->layers, .hidden = start->hidden};
    sandbox->hostname = wire_text(m), sandbox->bytes = wire_text(m), sandbox->inodes = wire_text(m);
    start->keep = wire_number(m);
    sandbox->debuggable = (int)wire_number(m), sandbox->n_layers = (int)wire_number(m);
    if (sandbox->n_layers < 1 || sandbox->n_layers >= MOST_LAYERS) return -1;
    for (int i = 0; i < sandbox->n_layers; i++) {
        start->layers[i] = wire_text(m);
        if (strchr(start->layers[i], '/') || *start->layers[i] == '.' || !*start->layers[i]) return -1;
    }
    sandbox->n_hidden = (int)wire_number(m);
    if (sandbox->n_hidden < 0 || sandbox->n_hidden > MOST_HIDDEN) return -1;
    for (int i = 0; i < sandbox->n_hidden; i++) start->hidden[i] = wire_text(m);
    start->limits_at = m->at, start->n_groups = 0;
    while (m->at < m->length) {
        const char *text = wire_text(m);
        if (*text != '/') continue;
        if (start->n_groups == MOST_GROUPS) return -1;
        start->groups[start->n_groups++] = text;
    }
    return 0;
}

/* What could not be done, with errno; NULL if nothing. */
static const char *put_into_groups(const char *pid) {
    static char path[1024];
    const char *group = NULL;
    for (m.at = request.limits_at; m.at < m.length;) {
        const char *text = wire_text(&m), *value = strchr(text, '=');
        if (*text == '/') {
            group = text;
            if (mkdir(group, 0755) && errno != EEXIST) return group;
        } else if (value && group) {
            snprintf(path, sizeof path, "%s/%.*s", group, (int)(value - text), text);
            write_file(path, value + 1);
            if (errno) return path;
        }
    }
    for (int i = 0; i < request.n_groups; i++) {
        snprintf(path, sizeof path, "%s/cgroup.procs", request.groups[i]);
        write_file(path, pid);
        if (errno) return path;
    }
    return NULL;
}

static void answer(int server, const char *pid, const char *failed) {
    char fields[1200];
    int length = *failed ? snprintf(fields, sizeof fields, "%s%c%s: %s", pid, 0, failed, strerror(errno)) : snprintf(fields, sizeof fields, "%s%c", pid, 0);
    wire_send(server, 'S', m.id, fields, (size_t)length + 1, NULL, 0);
}

static void start(int server, int first_id) {
    int go[2];
    char pid[16];
    start_read(&request, &m);
    if (m.n_fds != 1 || pipe2(go, O_CLOEXEC)) {
        answer(server, "0", "a sandbox");
        return;
    }
    request.sandbox.control = m.fds[0], request.sandbox.go = go[0];
    pid_t made = (pid_t)syscall(SYS_clone, CLONE_PARENT | CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | SIGCHLD, 0, 0, 0, 0);
    if (!made) {
        close(go[1]);
        sandbox_main(&request.sandbox);
    }
    close(go[0]);
    if (made < 0) answer(server, "0", "a process");
    else {
        snprintf(pid, sizeof pid, "%d", made);
        map_ids(made, first_id);
        const char *failed = errno ? "the map of users" : put_into_groups(pid);
        answer(server, pid, failed ? failed : "");   /* before it runs: nobody is told of its end first */
        if (failed || write(go[1], "", 1) != 1) kill(made, SIGKILL);
    }
    close(go[1]);
}

void starter_main(int server, int first_id) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    prctl(PR_SET_NAME, "starter", 0, 0, 0);
    while (wire_receive(server, &m, 0) > 0) start(server, first_id), wire_close_fds(&m);
    _exit(0);
}
