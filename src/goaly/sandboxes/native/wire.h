/* What the client, the server and the agents of sandboxes exchange: one datagram is one message, with descriptors beside it.
 * A message is an operation (a character), an id (32 bits), and fields that end with a zero byte each. */
#ifndef GOALY_WIRE_H
#define GOALY_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define WIRE_BYTES (192 * 1024)
#define WIRE_FDS 8

struct message {
    char op;
    uint32_t id;
    size_t length;        /* of the fields */
    size_t at;            /* where the next field begins */
    int fds[WIRE_FDS];
    int n_fds;
    char fields[WIRE_BYTES];
};

/* 1: a message is in `m`; 0: the other side has closed; -1: there is none now (errno is EAGAIN). */
int wire_receive(int socket, struct message *m, int flags);
/* Sends fields that were joined, zero bytes included. -1 with errno if the other side is gone. */
int wire_send(int socket, char op, uint32_t id, const char *fields, size_t length, const int *fds, int n_fds);
/* Sends an id with a formatted text as its only field. */
int wire_say(int socket, char op, uint32_t id, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* The next field; an empty text after the last one. */
const char *wire_text(struct message *m);
long long wire_number(struct message *m);
void wire_close_fds(struct message *m);

/* The process of a sandbox: never returns. */
struct sandbox {
    int control;          /* its end of the socket to the client */
    int go;               /* readable once the parent has written the maps of users and the control groups */
    const char *folder;   /* on which it may mount */
    const char *hostname;
    const char *bytes, *inodes;   /* of everything it writes */
    const char **layers;  /* names, the uppermost first */
    int n_layers;
    const char **hidden;  /* folders of the layers that are empty inside, for everybody's use */
    int n_hidden;
    int debuggable;       /* ptrace is allowed */
};
void sandbox_main(struct sandbox *sandbox) __attribute__((noreturn));
/* Forbids the system calls with which a program could reach the kernel's rarely used parts. -1 with errno. */
int forbid_system_calls(int debuggable);

#endif
