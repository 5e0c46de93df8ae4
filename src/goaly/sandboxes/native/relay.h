/* Joins a client's stream with a sandbox: messages, what its pipes carry, and connections.
 *
 * A frame is a kind (a character), an id (32 bits) and the length of what follows (32 bits).
 *   `M` a message, as datagrams carry them. From the client, its id is that of the first of the message's pipes, and the letters of the
 *       pipes come before it, up to a zero byte: `r` the command reads it, `s` it is one of its two streams, `w` it is a further output.
 *   `D` bytes of a pipe or a connection; `C` no more come; `X` nobody takes more.
 *   `A` this many bytes were taken (32 bits): at most WINDOW are on their way.
 *   `K` a message that has the pipes of a command, whose number the frame's id is; `P` pipes that an earlier client kept so: the
 *       frame's id is that of the first, and the message's text and the letters follow.
 *   `O` a connection to a socket that listens, whose id is the frame's; the connection's follows (32 bits).
 * What a command wrote to its streams goes before what it wrote later to a further output, and before its end. */
#ifndef GOALY_RELAY_H
#define GOALY_RELAY_H

#define WINDOW (256 * 1024)

void relay(int sandbox) __attribute__((noreturn));

#endif
