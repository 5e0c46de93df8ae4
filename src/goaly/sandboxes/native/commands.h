/* What PID 1 of a sandbox does for its client: commands (`R`), their end (`K`), files (`W`, `G`) and sockets that listen (`L`). */
#ifndef GOALY_COMMANDS_H
#define GOALY_COMMANDS_H

#include "wire.h"

#include <sys/types.h>

extern struct message m;          /* the request that is served */
extern int control;               /* the socket to the client */
extern uid_t reserved_user;       /* no command may be this user */
extern int debuggable;            /* ptrace is allowed */
extern char command_root[32];     /* the folder that is the root of commands; empty: the root of this process */

/* Tells the client that the sandbox cannot go on, and ends this process. */
void fail(const char *doing);
void must(long result, const char *doing);
/* Answers a request with an error: its number and what it is about. */
void refuse(const char *what);
/* A descriptor that is readable once a child has ended; `reap` then reports the commands among them. */
int command_signals(void);
void reap(int signals);
void serve_request(void);
/* The parent, process group and session of the process that a name in /proc stands for; 0 if it stands for none. */
int process_stat(const char *name, int *parent, int *group, int *session);

#endif
