#include "reduce/wire.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.hpp"
#include "reduce/clones.hpp"
#include "reduce/half.hpp"

namespace mccl {

namespace {

struct Half {
  static constexpr float kMost = 65504.0f;
  static constexpr uint16_t kNan = 0x7E00;
  static float load(uint16_t x) { return half_to_float(x); }
  static uint16_t store(float x) { return float_to_half(x); }
};
struct Brain {
  static constexpr float kMost = 0x1.FEp127f;
  static constexpr uint16_t kNan = 0x7FC0;
  static float load(uint16_t x) { return bfloat16_to_float(x); }
  static uint16_t store(float x) { return float_to_bfloat16(x); }
};

// An array of elements at any address.
template <class T>
class Elements {
 public:
  explicit Elements(const void* data) : data_(static_cast<const unsigned char*>(data)) {}
  T get(size_t i) const {
    T x;
    std::memcpy(&x, data_ + i * sizeof(T), sizeof(T));
    return x;
  }
  static void put(void* data, size_t i, T x) {
    std::memcpy(static_cast<unsigned char*>(data) + i * sizeof(T), &x, sizeof(T));
  }

 private:
  const unsigned char* data_;
};
using Wire = Elements<uint16_t>;

// Branch-free, so that loops over it vectorize.
template <class Wide, class Format>
inline __attribute__((always_inline)) uint16_t narrowed(Wide x, uint32_t& clipped) {
  constexpr Wide kMost = Format::kMost;
  constexpr Wide kFinite = std::numeric_limits<Wide>::max();
  const bool infinite = (x > kFinite) | (x < -kFinite);
  const bool beyond = ((x > kMost) | (x < -kMost)) & !infinite;
  const Wide most = x < 0 ? -kMost : kMost;
  clipped += beyond;
  const auto rounded = Format::store(static_cast<float>(beyond ? most : x));
  return x != x ? Format::kNan : rounded;
}

// A clone must be a function of its own: a lambda inside it would not be cloned.
template <class Wide, class Format>
struct Kernels {
  using InMemory = Elements<Wide>;

  MCCL_CLONES static size_t narrow(void* __restrict wire, const void* __restrict wide, size_t count, double scale) {
    const auto factor = static_cast<Wide>(scale);
    uint32_t clipped = 0;
    for (size_t i = 0; i < count; ++i) {
      Wire::put(wire, i, narrowed<Wide, Format>(InMemory(wide).get(i) * factor, clipped));
    }
    return clipped;
  }

  MCCL_CLONES static void widen(void* __restrict wide, const void* __restrict in, size_t count) {
    for (size_t i = 0; i < count; ++i) InMemory::put(wide, i, Format::load(Wire(in).get(i)));
  }

  MCCL_CLONES static size_t accumulate(void* __restrict wire, void* __restrict wide, const void* __restrict in,
                                       size_t count) {
    uint32_t clipped = 0;
    for (size_t i = 0; i < count; ++i) {
      const Wide sum = InMemory(wide).get(i) + Format::load(Wire(in).get(i));
      InMemory::put(wide, i, sum);
      Wire::put(wire, i, narrowed<Wide, Format>(sum, clipped));
    }
    return clipped;
  }

  // In blocks that stay in the first cache: one loop over both directions would not vectorize.
  static size_t narrow_through(void* wire, void* wide, size_t count) {
    size_t clipped = 0;
    for_each_block(count, [&](size_t at, size_t n) {
      clipped += narrow(wire_at(wire, at), wide_at(wide, at), n, 1);
      widen(wide_at(wide, at), wire_at(wire, at), n);
    });
    return clipped;
  }

  static size_t accumulate_through(void* wire, void* wide, const void* in, size_t count) {
    size_t clipped = 0;
    for_each_block(count, [&](size_t at, size_t n) {
      clipped += accumulate(wire_at(wire, at), wide_at(wide, at),
                            static_cast<const unsigned char*>(in) + at * sizeof(uint16_t), n);
      widen(wide_at(wide, at), wire_at(wire, at), n);
    });
    return clipped;
  }

  MCCL_CLONES static size_t forward(void* __restrict wire, const void* __restrict own, const void* __restrict in,
                                    size_t count, double scale) {
    const auto factor = static_cast<Wide>(scale);
    uint32_t clipped = 0;
    for (size_t i = 0; i < count; ++i) {
      const Wide sum = InMemory(own).get(i) * factor + Format::load(Wire(in).get(i));
      Wire::put(wire, i, narrowed<Wide, Format>(sum, clipped));
    }
    return clipped;
  }

  MCCL_CLONES static void deliver(void* out, const void* own, const void* in, size_t count, double scale) {
    const auto factor = static_cast<Wide>(scale);
    for (size_t i = 0; i < count; ++i) {
      InMemory::put(out, i, InMemory(own).get(i) * factor + Format::load(Wire(in).get(i)));
    }
  }

  MCCL_CLONES static void multiply(void* wide, size_t count, double factor) {
    for (size_t i = 0; i < count; ++i) {
      InMemory::put(wide, i, InMemory(wide).get(i) * static_cast<Wide>(factor));
    }
  }

  static void* wire_at(void* wire, size_t i) { return static_cast<unsigned char*>(wire) + i * sizeof(uint16_t); }
  static void* wide_at(void* wide, size_t i) { return static_cast<unsigned char*>(wide) + i * sizeof(Wide); }
  template <class Visit>
  static void for_each_block(size_t count, Visit visit) {
    constexpr size_t kBlock = 1024;
    for (size_t at = 0; at < count; at += kBlock) visit(at, std::min(kBlock, count - at));
  }

  static constexpr WireKernels table() {
    return {narrow, narrow_through, widen, accumulate, accumulate_through, forward, deliver, multiply};
  }
};

}  // namespace

WireKernels wire_kernels(DType memory, Compression wire) {
  const bool half = wire == Compression::kFloat16;
  if (half || wire == Compression::kBFloat16) {
    if (memory == DType::kFloat32) return half ? Kernels<float, Half>::table() : Kernels<float, Brain>::table();
    if (memory == DType::kFloat64) return half ? Kernels<double, Half>::table() : Kernels<double, Brain>::table();
  }
  throw_usage(std::string(to_string(memory)) + " cannot travel as " + to_string(wire));
}

}  // namespace mccl
