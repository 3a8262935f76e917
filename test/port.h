/* A TCP port for ranks that meet in a test. */
#ifndef TEST_PORT_H
#define TEST_PORT_H

#include "test.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

/* One that nobody has now at any address; nobody is likely to take it before the ranks do. */
static inline int free_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof address;
    int file = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(bind(file, (struct sockaddr *)&address, size) == 0);
    EXPECT(getsockname(file, (struct sockaddr *)&address, &size) == 0);
    close(file);
    return ntohs(address.sin_port);
}

#endif
