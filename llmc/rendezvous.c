/* Rank 0 never waits for a single peer: sockets do not block, one poll is for all of them, and a peer that has not yet said
   hello is a stranger with a seat among few. The others try again until their time is over. */
#include "rendezvous.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MAGIC_BYTES = 8,
    TOKEN_BYTES = 64,
    TEXT_BYTES = 252,
    HELLO_SECONDS = 5, /* that a peer may take to say hello */
    STRANGERS = 64     /* connections that have not said hello yet; more push out the oldest */
};
static const char MAGIC[MAGIC_BYTES + 1] = "flashgp1";

/* What travels; numbers in network order. */
struct hello {
    char magic[MAGIC_BYTES], token[TOKEN_BYTES];
    uint32_t ranks, rank;
};
struct answer {
    char magic[MAGIC_BYTES];
    uint32_t welcome; /* 0: refused, 1: let in, all are not there yet, 2: all are there */
    char text[TEXT_BYTES];
};
enum { REFUSED, WELCOME, COMPLETE };

static void sleep_ms(int milliseconds) {
    nanosleep(&(struct timespec){.tv_nsec = milliseconds * 1000000L}, NULL);
}

/* ---- sockets ---- */

static enum status resolve(struct addrinfo **out, const struct rendezvous_options *o) {
    struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    char port[16];
    snprintf(port, sizeof port, "%d", o->port);
    int error = getaddrinfo(o->address, port, &wanted, out);
    return error == 0 ? STATUS_OK
                      : fail("rank 0 is to be at %s (MASTER_ADDR): %s; set it to that host's name or number",
                            o->address, gai_strerror(error));
}

/* Messages go at once, and a machine that is gone is noticed within half a minute. */
static void set_up(int file) {
    static const struct {
        int level, name, value;
    } settings[] = {{IPPROTO_TCP, TCP_NODELAY, 1}, {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, 10}, {IPPROTO_TCP, TCP_KEEPINTVL, 5}, {IPPROTO_TCP, TCP_KEEPCNT, 4}};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        setsockopt(file, settings[i].level, settings[i].name, &settings[i].value, sizeof settings[i].value);
    }
}

static int new_socket(int family) {
    int file = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (file >= 0) {
        set_up(file);
    }
    return file;
}

bool socket_move(int file, void *data, size_t size, size_t *done, bool out) {
    while (*done < size) {
        char *at = (char *)data + *done;
        ssize_t n = out ? send(file, at, size - *done, MSG_NOSIGNAL) : recv(file, at, size - *done, 0);
        if (n > 0) {
            *done += (size_t)n;
        } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
            return false;
        } else if (errno == EAGAIN) {
            return true;
        }
    }
    return true;
}

bool socket_is_its_own_peer(int file) {
    struct sockaddr_storage own, peer;
    socklen_t own_bytes = sizeof own, peer_bytes = sizeof peer;
    memset(&own, 0, sizeof own);
    memset(&peer, 0, sizeof peer);
    return getsockname(file, (struct sockaddr *)&own, &own_bytes) == 0 &&
           getpeername(file, (struct sockaddr *)&peer, &peer_bytes) == 0 && own_bytes == peer_bytes &&
           memcmp(&own, &peer, own_bytes) == 0;
}

/* An answer fits the socket's buffer: it goes at once or the peer is lost anyway. */
static void send_answer(int file, uint32_t welcome, const char *text) {
    struct answer answer = {.welcome = htonl(welcome)};
    size_t done = 0;
    memcpy(answer.magic, MAGIC, MAGIC_BYTES);
    snprintf(answer.text, sizeof answer.text, "%s", text);
    socket_move(file, &answer, sizeof answer, &done, true);
}

static bool interrupted(const struct rendezvous_options *o) {
    return o->interrupted != NULL && o->interrupted() != 0;
}

static enum status fail_interrupted(const struct rendezvous_options *o) {
    return fail(
        "rank %d stopped by a signal before all ranks had come to %s port %d", o->rank, o->address, o->port);
}

/* ---- rank 0 ---- */

struct stranger {
    int file;
    double since;
    struct hello hello;
    size_t done;
};

struct host {
    const struct rendezvous_options *options;
    int listener;
    int *sockets; /* by rank; -1: not there yet */
    int there;    /* including this one */
    struct stranger strangers[STRANGERS];
    int stranger_count;
    char refused[TEXT_BYTES]; /* why a peer was turned away: the last that knew the token, if one did */
};

/* Listening at the address, or -1; errno says why. */
static int try_listen(const struct sockaddr *address, socklen_t bytes) {
    int on = 1, off = 0, file = new_socket(address->sa_family);
    if (file < 0) {
        return -1;
    }
    setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->sa_family == AF_INET6) {
        setsockopt(file, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); /* the wildcard is IPv4's, too */
    }
    if (bind(file, address, bytes) == 0 && listen(file, 1024) == 0) {
        return file;
    }
    int error = errno;
    close(file);
    errno = error;
    return -1;
}

/* At all of the machine's addresses. */
static int listen_everywhere(int port) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int file = try_listen((const struct sockaddr *)&six, sizeof six);
    return file >= 0 || errno == EADDRINUSE ? file : try_listen((const struct sockaddr *)&four, sizeof four);
}

/* At the address itself if it is a number. A machine's name may lead to its own loopback interface on that machine, and
   to another address everywhere else. */
static enum status open_listener(struct host *h) {
    const struct rendezvous_options *o = h->options;
    struct addrinfo *found;
    unsigned char number[sizeof(struct in6_addr)];
    bool exact = inet_pton(AF_INET, o->address, number) == 1 ||
                 inet_pton(AF_INET6, o->address, number) == 1 || strcmp(o->address, "localhost") == 0;
    CHECK(resolve(&found, o));
    if (exact) {
        for (struct addrinfo *a = found; a != NULL && h->listener < 0; a = a->ai_next) {
            h->listener = try_listen(a->ai_addr, a->ai_addrlen);
        }
    } else {
        h->listener = listen_everywhere(o->port);
    }
    int error = errno;
    freeaddrinfo(found);
    if (h->listener >= 0) {
        return STATUS_OK;
    }
    return fail("rank 0 cannot listen at %s port %d: %s%s", o->address, o->port, strerror(error),
        error == EADDRINUSE || error == EACCES ? "; choose another MASTER_PORT"
        : error == EADDRNOTAVAIL               ? "; MASTER_ADDR is to be the machine of rank 0"
                                               : "");
}

static void forget_stranger(struct host *h, int i) {
    h->strangers[i] = h->strangers[--h->stranger_count];
}

static void turn_away(struct host *h, int i, const char *text) {
    send_answer(h->strangers[i].file, REFUSED, text);
    close(h->strangers[i].file);
    forget_stranger(h, i);
}

/* Stranger i has said all of its hello. */
static void judge(struct host *h, int i) {
    const struct rendezvous_options *o = h->options;
    struct stranger *s = &h->strangers[i];
    char token[TOKEN_BYTES] = "";
    snprintf(token, sizeof token, "%s", o->token);
    uint32_t ranks = ntohl(s->hello.ranks), rank = ntohl(s->hello.rank);
    if (memcmp(s->hello.magic, MAGIC, MAGIC_BYTES) != 0) {
        close(s->file); /* no rank of anybody */
        forget_stranger(h, i);
    } else if (memcmp(s->hello.token, token, TOKEN_BYTES) != 0) {
        if (h->refused[0] == '\0') { /* maybe not one of this run's: what is known of those goes first */
            snprintf(h->refused, sizeof h->refused,
                "one came with another FLASHGPT_TOKEN, or of a job of another number: give all the same");
        }
        turn_away(h, i,
            "the ranks there are another run's (FLASHGPT_TOKEN, or the job's number, differs): choose "
            "another MASTER_PORT, or give all ranks of this run the same");
    } else if (ranks != (uint32_t)o->ranks || rank == 0 || rank >= ranks) {
        snprintf(h->refused, sizeof h->refused,
            "rank %u was started as one of %u ranks, rank 0 as one of %d: give all the same WORLD_SIZE", rank,
            ranks, o->ranks);
        turn_away(h, i, h->refused);
    } else if (h->sockets[rank] >= 0) {
        snprintf(h->refused, sizeof h->refused,
            "two processes were started as rank %u: give each a RANK of its own", rank);
        turn_away(h, i, h->refused);
    } else {
        h->sockets[rank] = s->file;
        h->there++;
        send_answer(s->file, WELCOME, "");
        forget_stranger(h, i);
    }
}

static void let_in(struct host *h) {
    int file;
    while ((file = accept4(h->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        set_up(file);
        if (h->stranger_count == STRANGERS) {
            int oldest = 0;
            for (int i = 1; i < STRANGERS; i++) {
                oldest = h->strangers[i].since < h->strangers[oldest].since ? i : oldest;
            }
            close(h->strangers[oldest].file);
            forget_stranger(h, oldest);
        }
        h->strangers[h->stranger_count++] = (struct stranger){.file = file, .since = time_seconds()};
    }
}

static void hear_strangers(struct host *h) {
    for (int i = h->stranger_count - 1; i >= 0; i--) { /* whoever leaves is replaced by one already heard */
        struct stranger *s = &h->strangers[i];
        bool alive = socket_move(s->file, &s->hello, sizeof s->hello, &s->done, false);
        if (s->done == sizeof s->hello) {
            judge(h, i);
        } else if (!alive || time_seconds() - s->since > HELLO_SECONDS) {
            close(s->file);
            forget_stranger(h, i);
        }
    }
}

/* A rank that was let in and has ended since may be started again. */
static void notice_gone(struct host *h) {
    char byte;
    for (int rank = 1; rank < h->options->ranks; rank++) {
        if (h->sockets[rank] >= 0) {
            ssize_t n = recv(h->sockets[rank], &byte, 1, MSG_PEEK);
            if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
                close(h->sockets[rank]);
                h->sockets[rank] = -1;
                h->there--;
            }
        }
    }
}

/* "rank 3" or "ranks 1, 2, 5" */
static void name_missing(const struct host *h, char *out, size_t size) {
    enum { MOST_NAMED = 8 };
    const char *separator = h->options->ranks - h->there > 1 ? "s " : " ";
    size_t length = (size_t)snprintf(out, size, "rank");
    for (int rank = 1, count = 0; rank < h->options->ranks && count <= MOST_NAMED; rank++) {
        if (h->sockets[rank] < 0) {
            char number[16];
            snprintf(number, sizeof number, "%d", rank);
            length += (size_t)snprintf(
                out + length, size - length, "%s%s", separator, count++ < MOST_NAMED ? number : "...");
            separator = ", ";
        }
    }
}

static enum status fail_missing(const struct host *h) {
    const struct rendezvous_options *o = h->options;
    char missing[128];
    name_missing(h, missing, sizeof missing);
    return fail("%s did not come to %s port %d within %g s; %s", missing, o->address, o->port,
        o->timeout_seconds,
        h->refused[0] != '\0' ? h->refused
                              : "start all with this MASTER_ADDR and MASTER_PORT, or raise --comm-timeout");
}

static void tell_missing(const struct host *h) {
    const struct rendezvous_options *o = h->options;
    char missing[128];
    name_missing(h, missing, sizeof missing);
    log_line("waiting  for %s of %d to come to %s port %d, %g s at most", missing, o->ranks, o->address,
        o->port, o->timeout_seconds);
}

static enum status wait_for_all(struct host *h) {
    enum { LOOK_MS = 100, SILENT_SECONDS = 3 };
    double begin = time_seconds(), end = begin + h->options->timeout_seconds;
    bool told = false;
    struct pollfd files[1 + STRANGERS];
    while (h->there < h->options->ranks) {
        bool stop = interrupted(h->options);
        if (stop || time_seconds() > end) {
            enum status status = stop ? fail_interrupted(h->options) : fail_missing(h);
            for (int rank = 1; rank < h->options->ranks; rank++) {
                if (h->sockets[rank] >= 0) {
                    send_answer(h->sockets[rank], REFUSED, error_message());
                }
            }
            return status;
        }
        if (h->options->tell && !told && time_seconds() > begin + SILENT_SECONDS) {
            tell_missing(h);
            told = true;
        }
        files[0] = (struct pollfd){.fd = h->listener, .events = POLLIN};
        for (int i = 0; i < h->stranger_count; i++) {
            files[1 + i] = (struct pollfd){.fd = h->strangers[i].file, .events = POLLIN};
        }
        poll(files, (nfds_t)(1 + h->stranger_count), LOOK_MS);
        let_in(h);
        hear_strangers(h);
        notice_gone(h);
    }
    for (int rank = 1; rank < h->options->ranks; rank++) {
        send_answer(h->sockets[rank], COMPLETE, "");
    }
    return STATUS_OK;
}

static enum status receive_all(int *sockets, const struct rendezvous_options *o) {
    struct host *h;
    CHECK(ALLOCATE(h, 1));
    h->options = o;
    h->listener = -1;
    h->sockets = sockets;
    h->there = 1;
    enum status status = open_listener(h);
    if (status == STATUS_OK) {
        status = wait_for_all(h);
        close(h->listener);
    }
    for (int i = 0; i < h->stranger_count; i++) {
        close(h->strangers[i].file);
    }
    free(h);
    return status;
}

/* ---- the other ranks ---- */

/* Connected, or -1: nobody there yet. errno says why. */
static int try_connect(const struct addrinfo *a, double end) {
    int file = new_socket(a->ai_family), error = errno;
    socklen_t size = sizeof error;
    if (file < 0) {
        return -1;
    }
    error = connect(file, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        struct pollfd wanted = {.fd = file, .events = POLLOUT};
        int patience_ms = (int)(1e3 * (end - time_seconds()));
        error = ETIMEDOUT;
        if (poll(&wanted, 1, patience_ms < 2000 ? (patience_ms > 0 ? patience_ms : 0) : 2000) == 1) {
            getsockopt(file, SOL_SOCKET, SO_ERROR, &error, &size);
        }
    }
    if (error == 0 && socket_is_its_own_peer(file)) {
        /* no port that is kept after close: rank 0 is to listen at it */
        struct linger at_once = {.l_onoff = 1};
        setsockopt(file, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        error = ECONNREFUSED;
    }
    if (error == 0) {
        return file;
    }
    close(file);
    errno = error;
    return -1;
}

/* All of the answer, or false: the peer hung up, sent something else, or time is over. */
static bool receive_answer(int file, struct answer *answer, const struct rendezvous_options *o, double end) {
    size_t done = 0;
    while (time_seconds() < end && !interrupted(o)) {
        struct pollfd wanted = {.fd = file, .events = POLLIN};
        poll(&wanted, 1, 100);
        bool alive = socket_move(file, answer, sizeof *answer, &done, false);
        if (done > 0 && memcmp(answer->magic, MAGIC, min_i64((int64_t)done, MAGIC_BYTES)) != 0) {
            return false;
        }
        if (done == sizeof *answer) {
            answer->text[TEXT_BYTES - 1] = '\0';
            return true;
        }
        if (!alive) {
            return false;
        }
    }
    return false;
}

static enum status fail_refused(const struct rendezvous_options *o, const char *text) {
    return fail("rank %d was not let in at %s port %d: %s", o->rank, o->address, o->port, text);
}

/* Says hello and waits until all are there. *again: rank 0 may come yet. */
static enum status introduce(int file, const struct rendezvous_options *o, double end, bool *again) {
    struct hello hello = {.ranks = htonl((uint32_t)o->ranks), .rank = htonl((uint32_t)o->rank)};
    struct answer answer;
    size_t done = 0;
    *again = false;
    memcpy(hello.magic, MAGIC, MAGIC_BYTES);
    snprintf(hello.token, sizeof hello.token, "%s", o->token);
    /* a hello fits the socket's buffer */
    double patience = min_i64((int64_t)(end - time_seconds()), 2 * HELLO_SECONDS) + 0.5;
    if (!socket_move(file, &hello, sizeof hello, &done, true) || done < sizeof hello ||
        !receive_answer(file, &answer, o, time_seconds() + patience)) {
        *again = true;
        return fail(
            "rank %d: what answers at %s port %d is not rank 0 of a run: another program has the port; "
            "choose another MASTER_PORT",
            o->rank, o->address, o->port);
    }
    if (ntohl(answer.welcome) == REFUSED) {
        return fail_refused(o, answer.text);
    }
    /* rank 0 has the last word on who did not come: a little later than its own end */
    if (!receive_answer(file, &answer, o, end + HELLO_SECONDS)) {
        *again = true;
        return fail(
            "rank %d: rank 0 at %s port %d ended before all ranks were there; what it printed says why",
            o->rank, o->address, o->port);
    }
    return ntohl(answer.welcome) == COMPLETE ? STATUS_OK : fail_refused(o, answer.text);
}

static enum status find_rank_0(int *socket_out, const struct rendezvous_options *o) {
    enum { AGAIN_MS = 100 };
    double end = time_seconds() + o->timeout_seconds;
    for (;;) {
        struct addrinfo *found = NULL;
        int file = -1, error = 0;
        bool again = true;
        enum status status = resolve(&found, o); /* a host's name may come late, too */
        for (struct addrinfo *a = found; a != NULL && file < 0; a = a->ai_next) {
            file = try_connect(a, end);
            error = errno;
        }
        if (found != NULL) {
            freeaddrinfo(found);
        }
        if (file >= 0) {
            status = introduce(file, o, end, &again);
            if (status == STATUS_OK) {
                *socket_out = file;
                return STATUS_OK;
            }
            close(file);
        } else if (status == STATUS_OK) {
            status = fail(
                "rank %d found no rank 0 at %s port %d within %g s: %s; start rank 0, check MASTER_ADDR and "
                "MASTER_PORT, or raise --comm-timeout",
                o->rank, o->address, o->port, o->timeout_seconds, strerror(error));
        }
        if (interrupted(o)) {
            return fail_interrupted(o);
        }
        if (!again || time_seconds() > end) {
            return status;
        }
        sleep_ms(AGAIN_MS);
    }
}

enum status rendezvous_meet(int *sockets, const struct rendezvous_options *options) {
    return options->rank == 0 ? receive_all(sockets, options) : find_rank_0(&sockets[0], options);
}
