#include "base/error.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mccl {

const char* to_string(Code code) {
  switch (code) {
    case Code::kPeerLost: return "peer lost";
    case Code::kPeerLeft: return "peer left";
    case Code::kTimeout: return "timeout";
    case Code::kAborted: return "aborted";
    case Code::kMismatch: return "mismatch";
    case Code::kProtocol: return "protocol error";
    case Code::kUsage: return "usage error";
    case Code::kSystem: return "system error";
    case Code::kExcluded: return "excluded";
  }
  return "error";
}

std::string ErrorInfo::message() const {
  std::string text = "mccl: ";
  if (rank >= 0) text += "rank " + std::to_string(rank) + ": ";
  if (!op.empty()) {
    text += op;
    if (ticket != 0) text += " #" + std::to_string(ticket);
    text += ": ";
  }
  text += to_string(code);
  if (peer >= 0) {
    text += ": rank " + std::to_string(peer);
    if (!peer_host.empty()) text += " on " + peer_host;
  }
  if (!detail.empty()) text += (peer >= 0 ? " " : ": ") + detail;
  if (sys_errno != 0) text += std::string(" (") + std::strerror(sys_errno) + ")";
  if (!advice.empty()) text += ". " + advice;
  return text;
}

std::string printable(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

void throw_usage(std::string detail, std::string advice) {
  ErrorInfo info;
  info.code = Code::kUsage;
  info.detail = std::move(detail);
  info.advice = std::move(advice);
  throw Error(std::move(info));
}

void throw_system(std::string detail, int sys_errno) {
  ErrorInfo info;
  info.code = Code::kSystem;
  info.detail = std::move(detail);
  info.sys_errno = sys_errno;
  throw Error(std::move(info));
}

void assertion_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "mccl: internal assertion failed: %s (%s:%d)\n", expression, file, line);
  std::abort();
}

}  // namespace mccl
