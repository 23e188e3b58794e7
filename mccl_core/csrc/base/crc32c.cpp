#include "base/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define MCCL_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__ARM_FEATURE_CRC32)
#define MCCL_CRC_TARGET
#elif defined(__clang__)
#define MCCL_CRC_TARGET __attribute__((target("crc")))
#else
#define MCCL_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace mccl {

namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b does to the checksum k bytes later.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1) ? (value >> 1) ^ 0x82F63B78u : value >> 1;
    tables[0][i] = value;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t i = 0; i < 256; ++i) tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xFF];
  }
  return tables;
}
constexpr Tables kTables = make_tables();

uint64_t load(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

#if defined(MCCL_CRC_TARGET)
MCCL_CRC_TARGET uint32_t by_instruction(const void* data, size_t nbytes, uint32_t before) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  uint64_t crc = ~before;
  for (; nbytes >= 8; bytes += 8, nbytes -= 8) crc = _mm_crc32_u64(crc, load(bytes));
  auto rest = static_cast<uint32_t>(crc);
  for (; nbytes > 0; ++bytes, --nbytes) rest = _mm_crc32_u8(rest, *bytes);
  return ~rest;
#else
  uint32_t crc = ~before;
  for (; nbytes >= 8; bytes += 8, nbytes -= 8) crc = __crc32cd(crc, load(bytes));
  for (; nbytes > 0; ++bytes, --nbytes) crc = __crc32cb(crc, *bytes);
  return ~crc;
#endif
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#elif defined(__linux__)
  return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return true;  // every Apple processor of this kind
#endif
}
#endif

}  // namespace

uint32_t crc32c_by_tables(const void* data, size_t nbytes, uint32_t before) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
    const uint64_t word = load(bytes) ^ crc;  // little-endian, as all our hosts
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; nbytes > 0; ++bytes, --nbytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xFF];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t nbytes, uint32_t before) {
#if defined(MCCL_CRC_TARGET)
  static const bool use_instruction = has_instruction();
  if (use_instruction) return by_instruction(data, nbytes, before);
#endif
  return crc32c_by_tables(data, nbytes, before);
}

}  // namespace mccl
