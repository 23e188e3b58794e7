#include "reduce/neon.hpp"

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "reduce/half.hpp"

namespace mccl {

namespace {

constexpr size_t kLanes = 8;

float32x4_t widen_bfloat16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }

// float_to_bfloat16, four at a time.
uint16x4_t narrow_bfloat16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
  const uint32x4_t quiet_nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet_nan), 16);
}

uint16x8_t add_bfloat16(uint16x8_t a, uint16x8_t b) {
  const float32x4_t low = vaddq_f32(widen_bfloat16(vget_low_u16(a)), widen_bfloat16(vget_low_u16(b)));
  const float32x4_t high = vaddq_f32(widen_bfloat16(vget_high_u16(a)), widen_bfloat16(vget_high_u16(b)));
  return vcombine_u16(narrow_bfloat16(low), narrow_bfloat16(high));
}

uint16x8_t add_half(uint16x8_t a, uint16x8_t b) {
  const float16x8_t x = vreinterpretq_f16_u16(a), y = vreinterpretq_f16_u16(b);
  const float32x4_t low = vaddq_f32(vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_low_f16(y)));
  const float32x4_t high = vaddq_f32(vcvt_f32_f16(vget_high_f16(x)), vcvt_f32_f16(vget_high_f16(y)));
  return vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(low), vcvt_f16_f32(high)));
}

uint16_t add_bfloat16_one(uint16_t a, uint16_t b) {
  return float_to_bfloat16(bfloat16_to_float(a) + bfloat16_to_float(b));
}
uint16_t add_half_one(uint16_t a, uint16_t b) { return float_to_half(half_to_float(a) + half_to_float(b)); }

template <uint16x8_t (*add)(uint16x8_t, uint16x8_t), uint16_t (*add_one)(uint16_t, uint16_t)>
void sum(void* out, const void* a, const void* b, size_t count) {
  auto* o = static_cast<unsigned char*>(out);
  const auto* x = static_cast<const unsigned char*>(a);
  const auto* y = static_cast<const unsigned char*>(b);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    uint16x8_t u, v;
    std::memcpy(&u, x + 2 * i, sizeof u);
    std::memcpy(&v, y + 2 * i, sizeof v);
    const uint16x8_t result = add(u, v);
    std::memcpy(o + 2 * i, &result, sizeof result);
  }
  for (; i < count; ++i) {
    uint16_t u, v;
    std::memcpy(&u, x + 2 * i, sizeof u);
    std::memcpy(&v, y + 2 * i, sizeof v);
    const uint16_t result = add_one(u, v);
    std::memcpy(o + 2 * i, &result, sizeof result);
  }
}

}  // namespace

void neon_sum_half(void* out, const void* a, const void* b, size_t count, double) {
  sum<add_half, add_half_one>(out, a, b, count);
}

void neon_sum_bfloat16(void* out, const void* a, const void* b, size_t count, double) {
  sum<add_bfloat16, add_bfloat16_one>(out, a, b, count);
}

}  // namespace mccl

#endif
