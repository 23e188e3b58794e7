// fp16 and bf16 to fp32 and back, round to nearest even, branch-free so that loops over them vectorize.
#pragma once

#include <bit>
#include <cstdint>

namespace mccl {

inline float bfloat16_to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

// Subnormals are normalized by a float multiplication: 2^112 moves fp16's exponent bias (15) to fp32's (127).
inline float half_to_float(uint16_t x) {
  const uint32_t sign = (uint32_t{x} & 0x8000u) << 16;
  const uint32_t magnitude = (uint32_t{x} & 0x7FFFu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude | 0x7F800000u;  // infinities and NaNs keep their mantissa
  const bool is_special = (x & 0x7C00u) == 0x7C00u;
  return std::bit_cast<float>(sign | (is_special ? special : std::bit_cast<uint32_t>(scaled)));
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal range: rebias the exponent and round the 13 dropped bits to nearest even.
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 lets the float unit round at fp16's subnormal spacing of 2^-24.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7C00u : result;  // 65536 and above; 65520..65536 carry into it above
  result = magnitude > 0x7F800000u ? nan : result;
  return static_cast<uint16_t>(sign | result);
}

}  // namespace mccl
