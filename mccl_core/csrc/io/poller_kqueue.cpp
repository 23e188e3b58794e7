#if defined(__APPLE__)

#include <sys/event.h>
#include <sys/time.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.hpp"
#include "io/poller.hpp"

namespace mccl {

namespace {
constexpr size_t kMaxEvents = 64;
constexpr uintptr_t kWakeIdent = 0;

void apply(int queue, uintptr_t ident, int16_t filter, uint16_t flags, uint32_t fflags, void* token) {
  struct kevent change;
  EV_SET(&change, ident, filter, flags, fflags, 0, token);
  if (::kevent(queue, &change, 1, nullptr, 0, nullptr) != 0 && errno != ENOENT) throw_system("kevent", errno);
}

void set_interest(int queue, int fd, void* token, Interest interest) {
  const auto ident = static_cast<uintptr_t>(fd);
  apply(queue, ident, EVFILT_READ, interest == Interest::kRead ? EV_ADD : EV_DELETE, 0, token);
  apply(queue, ident, EVFILT_WRITE, interest == Interest::kWrite ? EV_ADD : EV_DELETE, 0, token);
}
}  // namespace

Poller::Poller() : poll_(::kqueue()) {
  if (!poll_) throw_system("kqueue", errno);
  apply(poll_.get(), kWakeIdent, EVFILT_USER, EV_ADD | EV_CLEAR, NOTE_FFNOP, this);
}

void Poller::add(int fd, void* token, Interest interest) { set_interest(poll_.get(), fd, token, interest); }
void Poller::modify(int fd, void* token, Interest interest) { set_interest(poll_.get(), fd, token, interest); }
void Poller::remove(int fd) { set_interest(poll_.get(), fd, nullptr, Interest::kNone); }

size_t Poller::wait(std::span<PollEvent> out, TimePoint deadline) {
  std::array<struct kevent, kMaxEvents> events;
  timespec limit{};
  timespec* timeout = nullptr;
  if (deadline != kNever) {
    constexpr TimePoint kDay = 86'400'000'000'000;  // kevent refuses very long waits
    const TimePoint left = std::clamp<TimePoint>(deadline - now_ns(), 0, kDay);
    limit.tv_sec = static_cast<time_t>(left / 1'000'000'000);
    limit.tv_nsec = static_cast<long>(left % 1'000'000'000);
    timeout = &limit;
  }
  const int room = static_cast<int>(std::min(out.size(), events.size()));
  const int n = ::kevent(poll_.get(), nullptr, 0, events.data(), room, timeout);
  if (n < 0 && errno != EINTR) throw_system("kevent", errno);
  size_t count = 0;
  for (int i = 0; i < n; ++i) {
    const struct kevent& event = events[static_cast<size_t>(i)];
    if (event.filter == EVFILT_USER) {
      woken_.store(false);
      continue;
    }
    out[count++] = {event.udata, event.filter == EVFILT_READ, event.filter == EVFILT_WRITE};
  }
  return count;
}

void Poller::wake() {
  if (woken_.exchange(true)) return;
  apply(poll_.get(), kWakeIdent, EVFILT_USER, 0, NOTE_TRIGGER, this);
}

// A kqueue is not inherited by a forked child: its number may already name another file there.
void Poller::close_descriptors() {}

}  // namespace mccl

#endif
