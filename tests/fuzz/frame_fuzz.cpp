// Any 72 bytes, as they are and with the right header checksum: decode() throws Error, or gives what encode() would
// write again.
#include <array>
#include <cstdlib>
#include <cstring>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "transport/frame.hpp"

using namespace mccl;

namespace {

void decode_and_check(const HeaderBytes& bytes) {
  FrameHeader header;
  try {
    header = decode(bytes.data());
  } catch (const Error&) {
    return;
  }
  if (header.payload_nbytes > kMaxPayloadNbytes) std::abort();
  header.fingerprint.describe();
  HeaderBytes again;
  encode(header, again.data());
  if (again != bytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  HeaderBytes bytes{};
  std::memcpy(bytes.data(), data, nbytes < bytes.size() ? nbytes : bytes.size());
  decode_and_check(bytes);
  // The first two fields, too, are given away to get further: magic and version.
  FrameHeader header;
  HeaderBytes honest;
  encode(header, honest.data());
  std::memcpy(bytes.data(), honest.data(), 5);
  const uint32_t crc = crc32c(bytes.data(), kHeaderNbytes - sizeof crc);
  std::memcpy(bytes.data() + kHeaderNbytes - sizeof crc, &crc, sizeof crc);
  decode_and_check(bytes);
  return 0;
}
