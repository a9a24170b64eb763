/* A program that starts at once in the place of a Python interpreter: it hands its arguments, environment, current folder
 * and standard streams to a process that has imported everything already (stand_in.py), and ends as that says.
 *
 * The socket lies beside the program, under its name with ".socket".
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

extern char **environ;
enum { FAILED = 70 };

static void fail(const char *what)
{
    perror(what);
    exit(FAILED);
}

static void send_all(int server, const char *from, size_t count)
{
    while (count) {
        ssize_t sent = write(server, from, count);
        if (sent <= 0)
            fail("write");
        from += sent;
        count -= sent;
    }
}

static void append(char **message, size_t *length, const char *text)
{
    size_t size = strlen(text) + 1;
    *message = realloc(*message, *length + size);
    memcpy(*message + *length, text, size);
    *length += size;
}

/* The length of the message, and with it the three standard streams. */
static void send_streams(int server, uint64_t length)
{
    int streams[3] = {0, 1, 2};
    char control[CMSG_SPACE(sizeof streams)] = {0};
    struct iovec part = {&length, sizeof length};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof streams);
    memcpy(CMSG_DATA(rights), streams, sizeof streams);
    if (sendmsg(server, &header, 0) != sizeof length)
        fail("sendmsg");
}

/* NUL-terminated texts: the folder, the arguments, an empty one, the environment. */
int main(int count, char **arguments)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s.socket", arguments[0]);
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(server, (struct sockaddr *)&address, sizeof address))
        fail(address.sun_path);
    char folder[4096], *message = NULL;
    size_t length = 0;
    if (!getcwd(folder, sizeof folder))
        fail("getcwd");
    append(&message, &length, folder);
    for (int i = 1; i < count; i++)
        append(&message, &length, arguments[i]);
    append(&message, &length, "");
    for (char **variable = environ; *variable; variable++)
        append(&message, &length, *variable);
    send_streams(server, length);
    send_all(server, message, length);
    unsigned char code = FAILED;
    if (read(server, &code, 1) != 1)
        code = FAILED;
    return code;
}
