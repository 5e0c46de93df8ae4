/* Processes that start sandboxes for the server. */
#ifndef GOALY_STARTER_H
#define GOALY_STARTER_H

#include "wire.h"

#include <sys/types.h>

#define MOST_LAYERS 400
#define MOST_HIDDEN 64
#define MOST_GROUPS 8

/* What a request to start says. Fields: name, bytes, files, milliseconds without a client, ptrace, number of layers, layers (names of `I`
 * and `Y`), number of hidden folders, hidden folders, then control groups: a folder to make, and `file=value` for the folder before it. */
struct start {
    struct sandbox sandbox;
    long long keep;
    const char *layers[MOST_LAYERS], *hidden[MOST_HIDDEN], *groups[MOST_GROUPS];
    int n_groups;
    size_t limits_at;   /* where the control groups begin in the message */
};

/* -1 if the message asks for what cannot be. What it names lives as long as the message. */
int start_read(struct start *start, struct message *m);
/* Starts sandboxes for the server at the other end of a socket, which becomes their parent. Requests have a sandbox's control socket.
 * Answers: the pid; and if it failed, why. There is no process if the pid is 0. */
void starter_main(int server, int first_id) __attribute__((noreturn));
/* errno is 0 if all went well. */
void write_file(const char *path, const char *text);
/* Makes `first_id` and its followers the users of a process' namespace; this process' own user, if it is -1. */
void map_ids(pid_t pid, int first_id);

#endif
