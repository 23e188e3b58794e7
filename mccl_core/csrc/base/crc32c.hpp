// CRC-32C (Castagnoli polynomial, RFC 3720 appendix B.4), for frame headers and, on demand, payloads: by the
// processor's instruction where it has one (SSE 4.2, ARMv8), by tables otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mccl {

// Of `nbytes` bytes that follow those whose checksum is `before`.
uint32_t crc32c(const void* data, size_t nbytes, uint32_t before = 0);

// By tables alone, eight bytes a step.
uint32_t crc32c_by_tables(const void* data, size_t nbytes, uint32_t before = 0);

}  // namespace mccl
