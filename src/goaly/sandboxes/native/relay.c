#define _GNU_SOURCE
#include "relay.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_ENDS 4000
#define MOST_PIPES 8
#define CHUNK (64 * 1024)

/* This side of a pipe of a command (`r`, `s`, `w`), a connection (`c`), or a socket that listens (`l`). */
struct end {
    uint32_t id, owner;      /* the number of the command that has it */
    int fd;
    char kind;
    int sends, takes;        /* bytes may still come from it, and go to it */
    uint32_t credit;         /* bytes that the client has room for */
    uint32_t taken;          /* bytes that were written, and not yet reported */
    uint64_t read, due;      /* bytes that were read, and that must be before what is later */
    int late;                /* what it has is later than what its command's streams have */
    char *held;              /* bytes that wait until they can be written */
    size_t start, n_held;
};

struct frame { char kind; uint32_t id, length; } __attribute__((packed));
struct ended { uint32_t owner; size_t length; char text[64]; };

extern struct message m;
static struct end ends[MOST_ENDS];
static struct ended ended[MOST_ENDS];
static int n_ends, n_ended, sandbox;
static uint32_t connections = 1u << 31;

static void exactly(int fd, void *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = read(fd, (char *)to + done, bytes - done);
        if (n == 0 || (n < 0 && errno != EINTR)) _exit(0);
        if (n > 0) done += (size_t)n;
    }
}

static void say(char kind, uint32_t id, const void *first, size_t n_first, const void *second, size_t n_second) {
    struct frame frame = {kind, id, (uint32_t)(n_first + n_second)};
    struct iovec parts[3] = {{&frame, sizeof frame}, {(void *)first, n_first}, {(void *)second, n_second}};
    for (struct iovec *part = parts; part < parts + 3;) {
        ssize_t n = writev(1, part, (int)(parts + 3 - part));
        if (n < 0 && errno != EINTR) _exit(0);
        for (; n > 0 || (part < parts + 3 && !part->iov_len); part++) {
            size_t taken = (size_t)n < part->iov_len ? (size_t)n : part->iov_len;
            part->iov_base = (char *)part->iov_base + taken, part->iov_len -= taken, n -= (ssize_t)taken;
            if (part->iov_len) break;
        }
    }
}

static struct end *find(uint32_t id) {
    for (int i = 0; i < n_ends; i++)
        if (ends[i].id == id) return &ends[i];
    return NULL;
}

static struct end *add(uint32_t id, uint32_t owner, int fd, char kind) {
    if (n_ends == MOST_ENDS || fd < 0) _exit(1);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    ends[n_ends] = (struct end){.id = id, .owner = owner, .fd = fd, .kind = kind, .sends = kind != 'r' && kind != 'l',
        .takes = kind == 'r' || kind == 'c', .credit = WINDOW};
    return &ends[n_ends++];
}

static void stop_sending(struct end *end, int tell) {
    if (end->sends && tell) say('C', end->id, NULL, 0, NULL, 0);
    end->sends = 0;
}

static void stop_taking(struct end *end, int tell) {
    if (end->takes && tell) say('X', end->id, NULL, 0, NULL, 0);
    free(end->held);
    end->held = NULL, end->takes = 0, end->n_held = 0;
    if (end->kind == 'c') shutdown(end->fd, SHUT_WR);
}

static void report_taken(struct end *end, uint32_t bytes) {
    end->taken += bytes;
    if (end->taken < WINDOW / 4) return;
    say('A', end->id, &end->taken, 4, NULL, 0);
    end->taken = 0;
}

static void flush(struct end *end) {
    while (end->n_held) {
        ssize_t n = write(end->fd, end->held + end->start, end->n_held);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n < 0) {
            stop_taking(end, 1);
            return;
        }
        end->start += (size_t)n, end->n_held -= (size_t)n;
        report_taken(end, (uint32_t)n);
    }
    if (end->takes == 2) stop_taking(end, 0);   /* its client has sent the last bytes */
}

static void take(struct end *end, size_t bytes) {
    static char skipped[CHUNK];
    if (!end || !end->takes) {
        for (; bytes; bytes -= bytes < CHUNK ? bytes : CHUNK) exactly(0, skipped, bytes < CHUNK ? bytes : CHUNK);
        return;
    }
    if (!end->held && !(end->held = malloc(WINDOW))) _exit(1);
    if (end->n_held + bytes > WINDOW) _exit(1);
    if (end->start) memmove(end->held, end->held + end->start, end->n_held), end->start = 0;
    exactly(0, end->held + end->n_held, bytes);
    end->n_held += bytes;
    flush(end);
}

static void give(struct end *end) {
    static char buffer[CHUNK];
    ssize_t n = read(end->fd, buffer, end->credit < CHUNK ? end->credit : CHUNK);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        stop_sending(end, 1);
        return;
    }
    end->read += (uint64_t)n, end->credit -= (uint32_t)n, end->late = 0;
    say('D', end->id, buffer, (size_t)n, NULL, 0);
}

/* What the streams of a command have now goes first. */
static void note_due(uint32_t owner) {
    for (int i = 0; i < n_ends; i++) {
        int waiting = 0;
        if (ends[i].owner == owner && ends[i].kind == 's' && !ioctl(ends[i].fd, FIONREAD, &waiting)) ends[i].due = ends[i].read + (uint64_t)waiting;
    }
}

static int first_ones_gone(uint32_t owner) {
    for (int i = 0; i < n_ends; i++)
        if (ends[i].owner == owner && ends[i].kind == 's' && ends[i].sends && ends[i].read < ends[i].due) return 0;
    return 1;
}

static void say_ended(void) {
    for (int i = 0; i < n_ended;) {
        if (!first_ones_gone(ended[i].owner)) {
            i++;
            continue;
        }
        say('M', 0, ended[i].text, ended[i].length, NULL, 0);
        memmove(ended + i, ended + i + 1, sizeof *ended * (size_t)(--n_ended - i));
    }
}

/* The pipes of a command that an earlier client kept. */
static void take_kept(void) {
    uint32_t first = connections + 1, owner = (uint32_t)strtoul(wire_text(&m), NULL, 10);
    const char *pipes = wire_text(&m);
    for (int i = 0; i < m.n_fds && pipes[i]; i++) add(++connections, owner, m.fds[i], pipes[i]);
    say('P', first, m.fields, m.length, NULL, 0);
    m.n_fds = 0;
}

static void from_sandbox(void) {
    char head[5];
    int got = wire_receive(sandbox, &m, 0);
    if (got < 0) return;
    if (!got) _exit(0);
    if (m.op == 'L' && m.n_fds) add(m.id, 0, m.fds[0], 'l'), m.n_fds = 0;
    if (m.op == 'O' && m.n_fds) take_kept();
    wire_close_fds(&m);
    head[0] = m.op, memcpy(head + 1, &m.id, 4);
    if (m.op == 'X' && m.length + 5 <= sizeof ended->text && n_ended < MOST_ENDS) {
        struct ended *last = &ended[n_ended++];
        last->owner = m.id, last->length = m.length + 5;
        memcpy(last->text, head, 5), memcpy(last->text + 5, m.fields, m.length);
        note_due(m.id);
    } else say('M', 0, head, 5, m.fields, m.length);
}

/* The sandbox's process must not wait for this one while this one waits for it. */
static void to_sandbox(const char *data, size_t length, const int *fds, int n_fds) {
    uint32_t id;
    memcpy(&id, data + 1, 4);
    while (wire_send(sandbox, data[0], id, data + 5, length - 5, fds, n_fds)) {
        struct pollfd waiting = {sandbox, POLLIN | POLLOUT, 0};
        if (errno != EAGAIN) _exit(0);
        if (poll(&waiting, 1, -1) > 0 && waiting.revents & POLLIN) from_sandbox();
    }
}

static void pass_message(uint32_t first, char *text, size_t bytes) {
    int theirs[MOST_PIPES], n = 0;
    uint32_t number;
    size_t letters = strnlen(text, bytes);
    if (letters > MOST_PIPES || letters + 6 > bytes) _exit(1);
    memcpy(&number, text + letters + 2, 4);
    if (letters && n_ends + MOST_PIPES > MOST_ENDS) {
        char answer[] = "F....11\0too many commands";
        memcpy(answer + 1, &number, 4);
        say('M', 0, answer, sizeof answer, NULL, 0);
        return;
    }
    for (; n < (int)letters; n++) {
        int both[2], reads = text[n] == 'r';
        if (pipe2(both, O_CLOEXEC)) _exit(1);
        theirs[n] = both[!reads];
        add(first + (uint32_t)n, number, both[reads], text[n]);
    }
    to_sandbox(text + letters + 1, bytes - letters - 1, theirs, n);
    while (n) close(theirs[--n]);
}

/* Passes a message with the pipes that are left of a command. */
static void pass_pipes(uint32_t owner, char *text, size_t bytes) {
    int fds[WIRE_FDS], n = 0;
    uint32_t last = 0;
    for (struct end *next; n < WIRE_FDS; last = next->id) {
        next = NULL;
        for (int i = 0; i < n_ends; i++)
            if (ends[i].owner == owner && ends[i].id > last && (!next || ends[i].id < next->id)) next = &ends[i];
        if (!next) break;
        fds[n++] = next->fd, text[bytes++] = next->kind;
    }
    text[bytes++] = 0;
    to_sandbox(text, bytes, fds, n);
}

static void from_client(void) {
    static char text[WIRE_BYTES + 64];
    struct frame frame;
    uint32_t bytes = 0;
    exactly(0, &frame, sizeof frame);
    struct end *end = find(frame.id);
    if (frame.kind == 'D') {
        take(end, frame.length);
        return;
    }
    if (frame.length > WIRE_BYTES + 16) _exit(1);
    exactly(0, text, frame.length);
    if (frame.kind == 'M') pass_message(frame.id, text, frame.length);
    if (frame.kind == 'K') pass_pipes(frame.id, text, frame.length);
    if (!end) return;
    switch (frame.kind) {
        case 'A': memcpy(&bytes, text, 4), end->credit += bytes; break;
        case 'X': stop_sending(end, 0); break;
        case 'C':
            if (end->kind == 'l') close(end->fd), *end = ends[--n_ends];
            else if (end->takes) end->takes = 2, flush(end);
            break;
    }
}

static void accept_for(struct end *listening) {
    int s = accept4(listening->fd, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0) return;
    uint32_t id = ++connections, listener = listening->id;
    add(id, 0, s, 'c');
    say('O', listener, &id, 4, NULL, 0);
}

static short wanted(const struct end *end) {
    if (end->kind == 'l') return n_ends < MOST_ENDS / 8 ? POLLIN : 0;
    int reads = end->sends && end->credit && (!end->late || first_ones_gone(end->owner));
    return (short)((reads ? POLLIN : 0) | (end->n_held ? POLLOUT : 0));
}

void relay(int s) {
    static struct pollfd waiting[MOST_ENDS + 2];
    static uint32_t ids[MOST_ENDS];
    sandbox = s;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_NAME, "relay", 0, 0, 0);
    signal(SIGPIPE, SIG_IGN);
    fcntl(sandbox, F_SETFL, O_NONBLOCK);
    for (;;) {
        int n = n_ends;
        waiting[0] = (struct pollfd){0, POLLIN, 0}, waiting[1] = (struct pollfd){sandbox, POLLIN, 0};
        for (int i = 0; i < n; i++) {
            short events = wanted(&ends[i]);
            waiting[i + 2] = (struct pollfd){events ? ends[i].fd : -1, events, 0}, ids[i] = ends[i].id;
        }
        if (poll(waiting, (nfds_t)n + 2, -1) < 0) continue;
        for (int i = 0; i < n; i++) {
            struct end *end = waiting[i + 2].revents ? find(ids[i]) : NULL;
            if (!end) continue;
            if (end->kind == 'l') accept_for(end);
            else if (end->n_held && waiting[i + 2].revents & (POLLOUT | POLLERR)) flush(end);
            else if (end->kind == 'w' && !end->late) end->late = 1, note_due(end->owner);
            else if (end->sends) give(end);
        }
        if (waiting[1].revents) from_sandbox();
        if (waiting[0].revents) from_client();
        say_ended();
        for (int i = n_ends; i-- > 0;)
            if (ends[i].kind != 'l' && !ends[i].sends && !ends[i].takes) close(ends[i].fd), free(ends[i].held), ends[i] = ends[--n_ends];
    }
}
