// The one error type of the core: what happened, to which op, with which peer, and what to do next.
// Recoverable errors are thrown or stored as Error; broken invariants of our own abort through MCCL_ASSERT.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace mccl {

enum class Code : uint8_t {
  kPeerLost,
  kPeerLeft,
  kTimeout,
  kAborted,
  kMismatch,
  kProtocol,
  kUsage,
  kSystem,
  kExcluded
};

const char* to_string(Code code);

struct ErrorInfo {
  Code code = Code::kSystem;
  std::string op;       // "all_reduce", empty where no op is concerned
  uint64_t ticket = 0;  // 0 where no op is concerned
  int rank = -1;        // the rank that raises
  int peer = -1;        // the rank it was waiting for, or that caused the error
  std::string peer_host;
  int sys_errno = 0;
  std::string detail;  // what happened
  std::string advice;  // what to do next

  std::string message() const;
};

class Error : public std::exception {
 public:
  explicit Error(ErrorInfo info) : info_(std::move(info)), text_(info_.message()) {}
  const char* what() const noexcept override { return text_.c_str(); }
  const ErrorInfo& info() const { return info_; }

 private:
  ErrorInfo info_;
  std::string text_;
};

// A peer's words as they may stand in a message: control characters and what is not ASCII become '?'.
std::string printable(std::string text);

[[noreturn]] void throw_usage(std::string detail, std::string advice = "");
[[noreturn]] void throw_system(std::string detail, int sys_errno);
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);

}  // namespace mccl

#define MCCL_ASSERT(expression) \
  ((expression) ? static_cast<void>(0) : ::mccl::assertion_failed(#expression, __FILE__, __LINE__))
