// Element types and reduction operators.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mccl {

enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kBool,
  kCount,
};

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,  // integers: truncated towards zero, as C's division
  kProduct,
  kMin,
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
  kPremulSum,  // each rank's input times a factor (applied above this layer), then the sum
  kCount,
};

// How the elements of an op travel (docs/compression.md).
enum class Compression : uint8_t { kNone, kFloat16, kBFloat16, kTopK, kCount };

const char* to_string(DType dtype);
const char* to_string(ReduceOp op);
const char* to_string(Compression compression);
size_t element_nbytes(DType dtype);

}  // namespace mccl
