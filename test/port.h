/* A TCP port for ranks that meet in a test. */
#ifndef TEST_PORT_H
#define TEST_PORT_H

#include "test.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

/* One that nobody has now at any address, and that the system gives to nobody else until *holder is closed: ranks can
   listen at it, since the holder does not, and allow that an address is used again, as the holder does. */
static inline int hold_port(int *holder) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof address;
    int on = 1;
    *holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(setsockopt(*holder, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    EXPECT(bind(*holder, (struct sockaddr *)&address, size) == 0);
    EXPECT(getsockname(*holder, (struct sockaddr *)&address, &size) == 0);
    return ntohs(address.sin_port);
}

#endif
