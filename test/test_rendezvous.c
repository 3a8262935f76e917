/* How ranks find each other, by real processes on loopback addresses: ranks that come late or not at all, strangers on
   the port, wrong tokens and numbers. Every process says what it came to, and the test judges all of them. */
#include "llmc/rendezvous.h"
#include "port.h"
#include "test.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 8 };

/* What a process came to; in shared memory. */
struct outcome {
    enum status status;
    char message[512];
    double start, end;
    volatile bool started; /* and is at the mercy of a SIGTERM no more */
    bool greeted;          /* every socket leads to the rank that it should */
};

struct team {
    const char *address;
    int port, port_holder, started;
    struct outcome *outcomes; /* in the order in which they were started */
    pid_t process[MOST];
};

static void team_start(struct team *team, const char *address) {
    memset(team, 0, sizeof *team);
    team->address = address;
    team->port = hold_port(&team->port_holder);
    team->outcomes =
        mmap(NULL, MOST * sizeof(struct outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* Waits up to a second; the byte must be there in the end. */
static uint8_t receive_byte(int file) {
    uint8_t byte = 255;
    size_t done = 0;
    for (int i = 0; i < 1000 && done == 0 && socket_move(file, &byte, 1, &done, false); i++) {
        usleep(1000);
    }
    return byte;
}

/* Rank 0 sends each its number and gets it back. */
static bool greet(const int *sockets, int rank, int ranks) {
    bool right = true;
    for (int other = 0; other < ranks; other++) {
        uint8_t number = (uint8_t)other;
        size_t done = 0;
        if (rank == 0 && other > 0) {
            right = right && socket_move(sockets[other], &number, 1, &done, true) &&
                    receive_byte(sockets[other]) == other;
        } else if (rank > 0 && other == 0) {
            uint8_t own = receive_byte(sockets[0]);
            right = own == rank && socket_move(sockets[0], &own, 1, &done, true);
        } else {
            right = right && sockets[other] == -1;
        }
    }
    return right;
}

static volatile sig_atomic_t signal_caught;
static void interrupt(int number) {
    signal_caught = number;
}
static int is_interrupted(void) {
    return signal_caught;
}

static void team_add(
    struct team *team, int rank, int ranks, const char *token, double timeout_seconds, int delay_ms) {
    struct outcome *outcome = &team->outcomes[team->started];
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        int sockets[MOST];
        memset(sockets, -1, sizeof sockets);
        signal(SIGTERM, interrupt);
        outcome->started = true;
        usleep((useconds_t)delay_ms * 1000);
        struct rendezvous_options o = {
            team->address, team->port, token, rank, ranks, timeout_seconds, is_interrupted, false};
        outcome->start = time_seconds();
        outcome->status = rendezvous_meet(sockets, &o);
        outcome->end = time_seconds();
        if (outcome->status == STATUS_OK) {
            outcome->greeted = greet(sockets, rank, ranks);
        } else {
            snprintf(outcome->message, sizeof outcome->message, "%s", error_message());
        }
        _exit(0);
    }
    team->process[team->started++] = process;
}

static double seconds_of(const struct team *team, int i) {
    return team->outcomes[i].end - team->outcomes[i].start;
}

static bool has_ended(const struct team *team, int i) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)team->process[i], &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

static void team_wait(struct team *team) {
    for (int i = 0; i < team->started; i++) {
        EXPECT(waitpid(team->process[i], NULL, 0) == team->process[i]);
    }
}

/* SIGTERM, after so long at the meeting place. */
static void interrupt_after(const struct team *team, int i, int delay_ms) {
    while (!team->outcomes[i].started) {
        usleep(1000);
    }
    usleep((useconds_t)delay_ms * 1000);
    kill(team->process[i], SIGTERM);
}

static void team_free(struct team *team) {
    close(team->port_holder);
    munmap(team->outcomes, MOST * sizeof(struct outcome));
}

static void expect_all_met(const struct team *team, int count) {
    for (int i = 0; i < count; i++) {
        EXPECT_STRING(team->outcomes[i].message, "");
        EXPECT(team->outcomes[i].status == STATUS_OK && team->outcomes[i].greeted);
    }
}

/* A connection of a stranger, or -1. */
static int connect_to(const struct team *team) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)team->port)};
    inet_pton(AF_INET, team->address, &address.sin_addr);
    for (int i = 0; i < 200; i++) {
        int file = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(file, (struct sockaddr *)&address, sizeof address) == 0) {
            return file;
        }
        close(file);
        usleep(10000);
    }
    return -1;
}

/* ---- ranks that come ---- */

static void ranks_meet_at_any_address_of_the_machine(void) {
    static const char *const addresses[] = {"127.0.0.1", "127.0.0.2", "127.8.9.10", "localhost"};
    for (size_t i = 0; i < sizeof addresses / sizeof addresses[0]; i++) {
        struct team team;
        team_start(&team, addresses[i]);
        for (int rank = 0; rank < 4; rank++) {
            team_add(&team, rank, 4, "run 17", 20, 0);
        }
        team_wait(&team);
        expect_all_met(&team, 4);
        team_free(&team);
    }
}

/* A name may lead elsewhere on the machine itself than from outside: rank 0 listens at all addresses then. */
static void ranks_meet_at_the_machines_own_name(void) {
    struct team team;
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    team_start(&team, name);
    team_add(&team, 0, 2, "", 20, 0);
    struct addrinfo *found = NULL;
    if (getaddrinfo(name, NULL, NULL, &found) != 0) { /* a machine that does not know its name */
        team_wait(&team);
        EXPECT_CONTAINS(team.outcomes[0].message, "(MASTER_ADDR): ");
        team_free(&team);
        return;
    }
    freeaddrinfo(found);
    team.address = "127.0.0.3"; /* as if the name led here from elsewhere */
    team_add(&team, 1, 2, "", 20, 0);
    team_wait(&team);
    expect_all_met(&team, 2);
    team_free(&team);
}

static void two_runs_meet_at_one_port_of_two_addresses(void) {
    struct team left, right;
    team_start(&left, "127.0.0.2");
    team_start(&right, "127.0.0.3");
    right.port = left.port;
    for (int rank = 0; rank < 3; rank++) {
        team_add(&left, rank, 3, "left", 20, 0);
        team_add(&right, rank, 3, "right", 20, 0);
    }
    team_wait(&left);
    team_wait(&right);
    expect_all_met(&left, 3);
    expect_all_met(&right, 3);
    team_free(&left);
    team_free(&right);
}

static void a_late_rank_is_waited_for_also_if_it_is_the_first(void) {
    for (int late = 0; late < 3; late++) {
        struct team team;
        team_start(&team, "127.0.0.1");
        for (int rank = 0; rank < 3; rank++) {
            team_add(&team, rank, 3, "", 20, rank == late ? 700 : 0);
        }
        team_wait(&team);
        expect_all_met(&team, 3);
        for (int rank = 0; rank < 3; rank++) {
            EXPECT(team.outcomes[rank].end >= team.outcomes[late].start);
            EXPECT(team.outcomes[rank].end - team.outcomes[late].start < 5);
        }
        team_free(&team);
    }
}

static void a_rank_that_ended_while_waiting_may_come_again(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 3, "", 20, 0);
    team_add(&team, 1, 3, "", 20, 0);
    usleep(400000); /* it is in */
    kill(team.process[1], SIGKILL);
    usleep(300000);
    team_add(&team, 1, 3, "", 20, 0);
    team_add(&team, 2, 3, "", 20, 100);
    team_wait(&team);
    EXPECT(team.outcomes[0].greeted && team.outcomes[2].greeted && team.outcomes[3].greeted);
    team_free(&team);
}

/* ---- ranks that do not ---- */

static void a_missing_rank_is_named_to_all_after_the_timeout(void) {
    struct team team;
    char expected[200];
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 4, "", 1, 0);
    team_add(&team, 2, 4, "", 1, 0);
    team_wait(&team);
    snprintf(expected, sizeof expected,
        "ranks 1, 3 did not come to 127.0.0.1 port %d within 1 s; start all with this MASTER_ADDR and "
        "MASTER_PORT, or raise --comm-timeout",
        team.port);
    for (int i = 0; i < 2; i++) {
        EXPECT(team.outcomes[i].status == STATUS_ERROR);
        EXPECT(seconds_of(&team, i) > 0.9 && seconds_of(&team, i) < 8);
        EXPECT_CONTAINS(team.outcomes[i].message, expected);
    }
    team_free(&team);
}

static void a_missing_first_rank_is_told_after_the_timeout(void) {
    struct team team;
    char expected[200];
    team_start(&team, "127.0.0.1");
    team_add(&team, 1, 2, "", 1, 0);
    team_wait(&team);
    snprintf(expected, sizeof expected,
        "rank 1 found no rank 0 at 127.0.0.1 port %d within 1 s: Connection refused; start rank 0, check "
        "MASTER_ADDR "
        "and MASTER_PORT, or raise --comm-timeout",
        team.port);
    EXPECT_STRING(team.outcomes[0].message, expected);
    team_free(&team);
}

static void a_signal_ends_the_wait(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 3, "", 20, 0);
    team_add(&team, 1, 3, "", 20, 0);
    interrupt_after(&team, 1, 400);
    interrupt_after(&team, 0, 200);
    struct team lonely;
    team_start(&lonely, "127.0.0.1");
    team_add(&lonely, 1, 2, "", 20, 0);
    interrupt_after(&lonely, 0, 200);
    team_wait(&team);
    team_wait(&lonely);
    EXPECT_CONTAINS(team.outcomes[0].message, "rank 0 stopped by a signal before all ranks had come to ");
    EXPECT_CONTAINS(team.outcomes[1].message, "rank 1 stopped by a signal before all ranks had come to ");
    EXPECT_CONTAINS(lonely.outcomes[0].message, "rank 1 stopped by a signal before all ranks had come to ");
    EXPECT(seconds_of(&team, 0) < 10 && seconds_of(&team, 1) < 10 && seconds_of(&lonely, 0) < 10);
    team_free(&team);
    team_free(&lonely);
}

static void an_address_that_is_none_is_told(void) {
    struct team team;
    team_start(&team, "no-such-host.invalid");
    team_add(&team, 0, 2, "", 1, 0);
    team_add(&team, 1, 2, "", 1, 0);
    team_wait(&team);
    for (int i = 0; i < 2; i++) {
        EXPECT_CONTAINS(team.outcomes[i].message, "rank 0 is to be at no-such-host.invalid (MASTER_ADDR): ");
        EXPECT_CONTAINS(team.outcomes[i].message, "; set it to that host's name or number");
    }
    team_free(&team);
}

/* ---- ranks that may not ---- */

static void a_rank_of_another_run_is_not_let_in(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 2, "run 1", 20, 0);
    team_add(&team, 1, 2, "run 2", 20, 0);
    team_add(&team, 1, 2, "", 20, 0);
    while (!has_ended(&team, 1) || !has_ended(&team, 2)) {
        usleep(1000);
    }
    team_add(&team, 1, 2, "run 1", 20, 0);
    team_wait(&team);
    for (int i = 1; i < 3; i++) {
        EXPECT(team.outcomes[i].status == STATUS_ERROR && seconds_of(&team, i) < 10);
        EXPECT_CONTAINS(team.outcomes[i].message, "rank 1 was not let in at 127.0.0.1 port ");
        EXPECT_CONTAINS(team.outcomes[i].message, "another run's");
        EXPECT_CONTAINS(team.outcomes[i].message, "or give all ranks of this run the same"); /* not cut off */
    }
    EXPECT(team.outcomes[0].greeted && team.outcomes[3].greeted);
    team_free(&team);
}

static void who_waits_in_vain_hears_of_a_rank_with_another_token(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 2, "run 1", 1.5, 0);
    team_add(&team, 1, 2, "run 2", 1.5, 0);
    team_wait(&team);
    EXPECT_CONTAINS(team.outcomes[0].message, "rank 1 did not come");
    EXPECT_CONTAINS(team.outcomes[0].message,
        "within 1.5 s; one came with another FLASHGPT_TOKEN, or of a job "
        "of another number: give all the same");
    team_free(&team);
}

static void a_rank_that_counts_other_ranks_is_not_let_in_and_both_sides_say_why(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 3, "", 1.5, 0);
    team_add(&team, 1, 3, "", 1.5, 0);
    team_add(&team, 2, 4, "", 1.5, 0);
    team_wait(&team);
    EXPECT(seconds_of(&team, 2) < seconds_of(&team, 0)); /* who waits in vain does so to the end */
    EXPECT_CONTAINS(team.outcomes[2].message,
        "rank 2 was started as one of 4 ranks, rank 0 as one of 3: give all the same WORLD_SIZE");
    for (int i = 0; i < 2; i++) {
        EXPECT_CONTAINS(team.outcomes[i].message, "rank 2 did not come");
        EXPECT_CONTAINS(team.outcomes[i].message, "rank 2 was started as one of 4 ranks");
    }
    team_free(&team);
}

static void of_two_ranks_of_one_number_the_second_is_not_let_in(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 3, "", 20, 0);
    team_add(&team, 1, 3, "", 20, 0);
    team_add(&team, 1, 3, "", 20, 0);
    while (!has_ended(&team, 1) && !has_ended(&team, 2)) {
        usleep(1000);
    }
    team_add(&team, 2, 3, "", 20, 0);
    team_wait(&team);
    int second = team.outcomes[1].status == STATUS_OK ? 2 : 1;
    EXPECT(team.outcomes[second].status == STATUS_ERROR);
    EXPECT_CONTAINS(
        team.outcomes[second].message, "two processes were started as rank 1: give each a RANK of its own");
    EXPECT(team.outcomes[0].greeted && team.outcomes[3 - second].greeted && team.outcomes[3].greeted);
    team_free(&team);
}

/* ---- others on the port ---- */

/* A program that holds the port and says `words` to everybody. */
static pid_t start_other_program(struct team *team, const char *words) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    inet_pton(AF_INET, team->address, &address.sin_addr);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 10) == 0);
    EXPECT(getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    team->port = ntohs(address.sin_port);
    pid_t process = fork();
    if (process == 0) {
        for (;;) {
            int file = accept(listener, NULL, NULL);
            send(file, words, strlen(words), MSG_NOSIGNAL);
        }
    }
    close(listener);
    return process;
}

static void a_port_in_use_is_told_by_the_first_rank_and_by_the_others(void) {
    static const char *const words[] = {"HTTP/1.0 400 Bad Request\r\n\r\n", "", "flash"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        struct team team;
        char expected[200];
        team_start(&team, "127.0.0.1");
        pid_t other = start_other_program(&team, words[i]);
        team_add(&team, 0, 2, "", 1, 0);
        team_add(&team, 1, 2, "", 1, 0);
        team_wait(&team);
        snprintf(expected, sizeof expected,
            "rank 0 cannot listen at 127.0.0.1 port %d: Address already in use; choose another MASTER_PORT",
            team.port);
        EXPECT_STRING(team.outcomes[0].message, expected);
        EXPECT(seconds_of(&team, 0) < 1);
        EXPECT_CONTAINS(team.outcomes[1].message,
            "is not rank 0 of a run: another program has the port; choose another MASTER_PORT");
        EXPECT(seconds_of(&team, 1) < 8);
        kill(other, SIGKILL);
        waitpid(other, NULL, 0);
        team_free(&team);
    }
}

static void garbage_and_silence_at_the_port_keep_no_rank_out(void) {
    struct team team;
    int files[100];
    char garbage[4096];
    team_start(&team, "127.0.0.1");
    team_add(&team, 0, 3, "secret", 20, 0);
    for (int i = 0; i < 100; i++) { /* more than rank 0 listens to at once */
        files[i] = connect_to(&team);
        EXPECT(files[i] >= 0);
        for (size_t byte = 0; byte < sizeof garbage; byte++) {
            garbage[byte] = (char)(i * 37 + (int)byte * 101);
        }
        memcpy(garbage, i % 3 == 0 ? "flashgp1" : "GET / HT", 8);
        size_t bytes = (size_t)(i % 5) * (size_t)(i % 7) * 50; /* nothing, half a hello, more than one */
        EXPECT(send(files[i], garbage, bytes, MSG_NOSIGNAL) >= 0 || bytes > 80);
        if (i % 4 == 0) {
            close(files[i]);
        }
    }
    team_add(&team, 1, 3, "secret", 20, 0);
    team_add(&team, 2, 3, "secret", 20, 0);
    team_wait(&team);
    expect_all_met(&team, 3);
    EXPECT(seconds_of(&team, 1) < 10 && seconds_of(&team, 2) < 10);
    for (int i = 0; i < 100; i++) {
        if (i % 4 != 0) {
            close(files[i]);
        }
    }
    team_free(&team);
}

static void once_all_are_there_nobody_listens(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    int sockets[2] = {-1, -1};
    team_add(&team, 1, 2, "", 20, 0);
    struct rendezvous_options o = {team.address, team.port, "", 0, 2, 20, NULL, false};
    EXPECT(rendezvous_meet(sockets, &o) == STATUS_OK);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)team.port)};
    inet_pton(AF_INET, team.address, &address.sin_addr);
    int file = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(connect(file, (struct sockaddr *)&address, sizeof address) != 0);
    close(file);
    EXPECT(greet(sockets, 0, 2));
    team_wait(&team);
    close(sockets[1]);
    team_free(&team);
}

/* The process gets a network of its own, in which the system gives out two ports only; false: that is not allowed. */
static bool have_own_network(const char *ports) {
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && unshare(CLONE_NEWNET) != 0) {
        return false;
    }
    int file = socket(AF_INET, SOCK_DGRAM, 0);
    FILE *range = fopen("/proc/sys/net/ipv4/ip_local_port_range", "w");
    bool done =
        file >= 0 && range != NULL && ioctl(file, SIOCSIFFLAGS, &loopback) == 0 && fputs(ports, range) >= 0;
    if (range != NULL) {
        done = fclose(range) == 0 && done;
    }
    close(file);
    return done;
}

static void a_connection_to_itself_is_told_from_others(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    int itself = socket(AF_INET, SOCK_STREAM, 0), listener = socket(AF_INET, SOCK_STREAM, 0);
    int other = socket(AF_INET, SOCK_STREAM, 0), accepted;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    EXPECT(bind(itself, (struct sockaddr *)&address, size) == 0);
    EXPECT(getsockname(itself, (struct sockaddr *)&address, &size) == 0);
    EXPECT(!socket_is_its_own_peer(itself)); /* not connected */
    EXPECT(connect(itself, (struct sockaddr *)&address, size) == 0);
    EXPECT(socket_is_its_own_peer(itself));
    address.sin_port = 0;
    EXPECT(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0);
    EXPECT(getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    EXPECT(connect(other, (struct sockaddr *)&address, size) == 0);
    accepted = accept(listener, NULL, NULL);
    EXPECT(accepted >= 0 && !socket_is_its_own_peer(other) && !socket_is_its_own_peer(accepted));
    close(itself), close(listener), close(other), close(accepted);
}

/* While nobody listens, a connection to a port of the range that the system takes its own from may lead back to itself. */
static void a_rank_that_seeks_the_first_does_not_meet_itself(void) {
    struct team team;
    team_start(&team, "127.0.0.1");
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        have_own_network("40000 40001");
        team.port = 40000;
        team_add(&team, 1, 2, "", 10, 0);
        team_add(&team, 0, 2, "", 10, 1500);
        team_wait(&team);
        _exit(0);
    }
    EXPECT(waitpid(process, NULL, 0) == process);
    expect_all_met(&team, 2);
    team_free(&team);
}

static bool own_networks_are_allowed(void) {
    int code = 1;
    pid_t process = fork();
    if (process == 0) {
        _exit(!have_own_network("40000 40001"));
    }
    return waitpid(process, &code, 0) == process && code == 0;
}

static void the_first_rank_says_for_whom_it_waits(void) {
    struct team team;
    char line[256] = "";
    int ends[2];
    team_start(&team, "127.0.0.1");
    EXPECT(pipe(ends) == 0);
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        int sockets[4] = {-1, -1, -1, -1};
        struct rendezvous_options o = {team.address, team.port, "", 0, 4, 20, NULL, true};
        dup2(ends[1], STDOUT_FILENO);
        log_enable(true);
        enum status status = rendezvous_meet(sockets, &o);
        fflush(stdout);
        _exit((int)status);
    }
    close(ends[1]);
    team_add(&team, 2, 4, "", 20, 0);
    team_add(&team, 1, 4, "", 20, 4500);
    team_add(&team, 3, 4, "", 20, 4500);
    int ending;
    EXPECT(waitpid(process, &ending, 0) == process && ending == 0);
    EXPECT(read(ends[0], line, sizeof line - 1) > 0);
    close(ends[0]);
    char expected[256];
    snprintf(expected, sizeof expected,
        "waiting  for ranks 1, 3 of 4 to come to 127.0.0.1 port %d, 20 s at most\n", team.port);
    EXPECT_STRING(line, expected);
    team_wait(&team);
    team_free(&team);
}

int main(void) {
    RUN(ranks_meet_at_any_address_of_the_machine);
    RUN(ranks_meet_at_the_machines_own_name);
    RUN(two_runs_meet_at_one_port_of_two_addresses);
    RUN(a_late_rank_is_waited_for_also_if_it_is_the_first);
    RUN(a_rank_that_ended_while_waiting_may_come_again);
    RUN(a_missing_rank_is_named_to_all_after_the_timeout);
    RUN(a_missing_first_rank_is_told_after_the_timeout);
    RUN(a_signal_ends_the_wait);
    RUN(an_address_that_is_none_is_told);
    RUN(a_rank_of_another_run_is_not_let_in);
    RUN(who_waits_in_vain_hears_of_a_rank_with_another_token);
    RUN(a_rank_that_counts_other_ranks_is_not_let_in_and_both_sides_say_why);
    RUN(of_two_ranks_of_one_number_the_second_is_not_let_in);
    RUN(a_port_in_use_is_told_by_the_first_rank_and_by_the_others);
    RUN(garbage_and_silence_at_the_port_keep_no_rank_out);
    RUN(once_all_are_there_nobody_listens);
    RUN(a_connection_to_itself_is_told_from_others);
    if (own_networks_are_allowed()) {
        RUN(a_rank_that_seeks_the_first_does_not_meet_itself);
    }
    RUN(the_first_rank_says_for_whom_it_waits);
    return test_summary();
}
