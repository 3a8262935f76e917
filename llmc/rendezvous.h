/* How the ranks of a run find each other over TCP. Rank 0 listens at an address that all know; the others connect, say
   who they are, and are let in or told why not:

     hello    magic, the run's token, number of ranks, own rank              to rank 0
     answer   let in, or not and a line that says why; later: all are there  to the other

   Rank 0 lets in a peer that knows the token, counts the same number of ranks and has a number that is still free; it
   hangs up on anything else, however long or slow, without waiting for it. Once all are there it listens no more. */
#ifndef LLMC_RENDEZVOUS_H
#define LLMC_RENDEZVOUS_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

struct rendezvous_options {
    const char *address; /* of rank 0: a host's name or number */
    int port;
    const char *token; /* "" is a token, too */
    int rank, ranks;
    double timeout_seconds;
    int (*interrupted)(void); /* not 0: give up; NULL: nothing does that */
    bool tell;                /* rank 0 logs for whom it waits, if it has to */
};

/* Returns when all are there. sockets[ranks], set to -1 by the caller: rank 0 gets one to every other rank, in its place;
   the others get sockets[0]. They are nonblocking; the caller closes them, also after a failure.
   Errors name the address, and who did not come or why this rank was not let in. */
enum status rendezvous_meet(int *sockets, const struct rendezvous_options *options);

/* Sends from, or receives into, bytes [*done, size) of data as much as goes at once. False: the connection is of no more
   use. */
bool socket_move(int socket, void *data, size_t size, size_t *done, bool out);

/* Where nobody listens, a connection from this machine to a port of its own may be met by itself, if the system gave it
   that very port. */
bool socket_is_its_own_peer(int socket);

#ifdef __cplusplus
}
#endif

#endif
