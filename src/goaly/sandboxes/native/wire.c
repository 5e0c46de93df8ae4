#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define HEAD 5

int wire_receive(int socket, struct message *m, int flags) {
    char head[HEAD];
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS)]; } control;
    struct iovec parts[2] = {{head, HEAD}, {m->fields, WIRE_BYTES - 1}};
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t got;
    do got = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | flags);
    while (got < 0 && errno == EINTR);
    if (got < 0) return errno == EAGAIN ? -1 : 0;
    m->n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            m->n_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(m->fds, CMSG_DATA(c), sizeof(int) * (size_t)m->n_fds);
        }
    if (got < HEAD) return wire_close_fds(m), 0;
    m->op = head[0];
    memcpy(&m->id, head + 1, 4);
    m->length = (size_t)got - HEAD;
    m->fields[m->length] = 0;
    m->at = 0;
    return 1;
}

int wire_send(int socket, char op, uint32_t id, const char *fields, size_t length, const int *fds, int n_fds) {
    char head[HEAD] = {op};
    memcpy(head + 1, &id, 4);
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int) * WIRE_FDS)]; } control;
    struct iovec parts[2] = {{head, HEAD}, {(char *)fields, length}};
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = length ? 2 : 1};
    if (n_fds) {
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)n_fds);
    }
    ssize_t sent;
    do sent = sendmsg(socket, &header, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}

int wire_say(int socket, char op, uint32_t id, const char *format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (length >= (int)sizeof text) length = sizeof text - 1;
    return wire_send(socket, op, id, text, (size_t)length + 1, NULL, 0);
}

const char *wire_text(struct message *m) {
    if (m->at >= m->length) return "";
    const char *text = m->fields + m->at;
    m->at += strlen(text) + 1;
    return text;
}

long long wire_number(struct message *m) { return atoll(wire_text(m)); }

void wire_close_fds(struct message *m) {
    while (m->n_fds) close(m->fds[--m->n_fds]);
}
