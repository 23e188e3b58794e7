#if defined(__linux__)

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.hpp"
#include "io/poller.hpp"

namespace mccl {

namespace {
constexpr size_t kMaxEvents = 64;

uint32_t epoll_mask(Interest interest) {
  switch (interest) {
    case Interest::kRead: return EPOLLIN;
    case Interest::kWrite: return EPOLLOUT;
    case Interest::kNone: break;
  }
  return 0;
}

void control(int poll_fd, int operation, int fd, void* token, Interest interest) {
  epoll_event event{};
  event.events = epoll_mask(interest);
  event.data.ptr = token;
  if (::epoll_ctl(poll_fd, operation, fd, &event) != 0) throw_system("epoll_ctl", errno);
}

int timeout_ms(TimePoint deadline) {
  if (deadline == kNever) return -1;
  const TimePoint left = deadline - now_ns();
  if (left <= 0) return 0;
  return static_cast<int>(std::min<TimePoint>((left + 999'999) / 1'000'000, 1 << 30));
}
}  // namespace

Poller::Poller() : poll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!poll_ || !wake_) throw_system("epoll_create1/eventfd", errno);
  control(poll_.get(), EPOLL_CTL_ADD, wake_.get(), this, Interest::kRead);
}

void Poller::add(int fd, void* token, Interest interest) { control(poll_.get(), EPOLL_CTL_ADD, fd, token, interest); }
void Poller::modify(int fd, void* token, Interest interest) {
  control(poll_.get(), EPOLL_CTL_MOD, fd, token, interest);
}
void Poller::remove(int fd) { ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

size_t Poller::wait(std::span<PollEvent> out, TimePoint deadline) {
  std::array<epoll_event, kMaxEvents> events;
  const int room = static_cast<int>(std::min(out.size(), events.size()));
  const int n = ::epoll_wait(poll_.get(), events.data(), room, timeout_ms(deadline));
  if (n < 0 && errno != EINTR) throw_system("epoll_wait", errno);
  size_t count = 0;
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.ptr == this) {
      // In this order: a wake() after the read finds woken_ set and needs no write, since the caller of wait() has yet
      // to look for work. The other way round, the read could take a later wake()'s write and leave woken_ set for
      // ever.
      uint64_t ignored;
      if (::read(wake_.get(), &ignored, sizeof ignored) < 0 && errno != EAGAIN) throw_system("eventfd read", errno);
      woken_.store(false);
      continue;
    }
    const bool failed = (event.events & (EPOLLERR | EPOLLHUP)) != 0;
    out[count++] = {event.data.ptr, failed || (event.events & EPOLLIN) != 0, failed || (event.events & EPOLLOUT) != 0};
  }
  return count;
}

void Poller::wake() {
  if (woken_.exchange(true)) return;
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) < 0 && errno != EAGAIN) throw_system("eventfd write", errno);
}

void Poller::close_descriptors() {
  poll_.reset();
  wake_.reset();
}

}  // namespace mccl

#endif
