// The fuzzer's bytes, taken from the front; zeros once they are used up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t nbytes) : left_(data, nbytes) {}

  bool empty() const { return left_.empty(); }
  template <class T>
  T take() {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T) && !left_.empty(); ++i) {
      value |= uint64_t{left_.front()} << (8 * i);
      left_ = left_.subspan(1);
    }
    return static_cast<T>(value);
  }
  std::span<const uint8_t> take_bytes(size_t nbytes) {
    const auto front = left_.first(nbytes < left_.size() ? nbytes : left_.size());
    left_ = left_.subspan(front.size());
    return front;
  }

 private:
  std::span<const uint8_t> left_;
};

}  // namespace fuzz
