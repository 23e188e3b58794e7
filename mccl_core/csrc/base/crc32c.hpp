// CRC-32C (Castagnoli polynomial, RFC 3720 appendix B.4), for frame headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mccl {

namespace detail {
constexpr std::array<uint32_t, 256> crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1) ? (value >> 1) ^ 0x82F63B78u : value >> 1;
    table[i] = value;
  }
  return table;
}
inline constexpr auto kCrc32cTable = crc32c_table();
}  // namespace detail

inline uint32_t crc32c(const void* data, size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~0u;
  for (size_t i = 0; i < nbytes; ++i) crc = (crc >> 8) ^ detail::kCrc32cTable[(crc ^ bytes[i]) & 0xFF];
  return ~crc;
}

}  // namespace mccl
