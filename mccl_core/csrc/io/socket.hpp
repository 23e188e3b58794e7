// Non-blocking scatter/gather I/O on stream sockets.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <span>

namespace mccl {

// Non-blocking, no Nagle, no SIGPIPE; buffer sizes where nbytes > 0. Unix sockets are accepted, too.
void configure_stream_socket(int fd, int buffer_nbytes);
// Return what the system call returns; errno tells the rest. Interrupted calls are repeated.
ssize_t send_some(int fd, std::span<iovec> parts);
ssize_t receive_some(int fd, std::span<iovec> parts);
void half_close(int fd);
// Both directions: the peer sees the end, and every thread here that still uses the descriptor gets errors.
void shut_down(int fd);

}  // namespace mccl
