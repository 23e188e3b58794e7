#include "io/socket.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/error.hpp"

namespace mccl {

void configure_stream_socket(int fd, int buffer_nbytes) {
  const int flags = ::fcntl(fd, F_GETFL, 0);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_system("fcntl", errno);
  const int on = 1;
  // A Unix socket pair has no such option: that is fine.
  if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0 && errno != EOPNOTSUPP && errno != ENOPROTOOPT) {
    throw_system("setsockopt(TCP_NODELAY)", errno);
  }
#if defined(SO_NOSIGPIPE)
  if (::setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on) != 0) throw_system("setsockopt(SO_NOSIGPIPE)", errno);
#endif
  // A Unix socket has 208 KiB on Linux and 8 on macOS: the threads of both sides would sleep and wake again for that
  // little. Far more than this does not stay in a cache.
  constexpr int kUnixBuffer_nbytes = 1 << 20;
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  const bool is_unix = ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 && own.ss_family == AF_UNIX;
  if (is_unix && buffer_nbytes == 0) buffer_nbytes = kUnixBuffer_nbytes;
  if (buffer_nbytes > 0) {
    for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
      if (::setsockopt(fd, SOL_SOCKET, option, &buffer_nbytes, sizeof buffer_nbytes) != 0) {
        throw_system("setsockopt(SO_SNDBUF/SO_RCVBUF)", errno);
      }
    }
  }
}

ssize_t send_some(int fd, std::span<iovec> parts) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(parts.size());
#if defined(MSG_NOSIGNAL)
  const int flags = MSG_NOSIGNAL;
#else
  const int flags = 0;
#endif
  ssize_t n;
  do {
    n = ::sendmsg(fd, &message, flags);
  } while (n < 0 && errno == EINTR);
  return n;
}

ssize_t receive_some(int fd, std::span<iovec> parts) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(parts.size());
  ssize_t n;
  do {
    n = ::recvmsg(fd, &message, 0);
  } while (n < 0 && errno == EINTR);
  return n;
}

void half_close(int fd) { ::shutdown(fd, SHUT_WR); }
void shut_down(int fd) { ::shutdown(fd, SHUT_RDWR); }

}  // namespace mccl
