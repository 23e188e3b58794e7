#include "reduce/reduce.hpp"

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/error.hpp"
#include "reduce/clones.hpp"
#include "reduce/half.hpp"
#include "reduce/vector_sum.hpp"

namespace mccl {

namespace {

// How an element type is stored and computed. Wide is fp32 for the half types, else the type itself.
template <class T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide load(Stored x) { return x; }
  static Stored store(Wide x) { return x; }
};
struct Half {
  using Stored = uint16_t;
  using Wide = float;
  static Wide load(Stored x) { return half_to_float(x); }
  static Stored store(Wide x) { return float_to_half(x); }
};
struct Brain {
  using Stored = uint16_t;
  using Wide = float;
  static Wide load(Stored x) { return bfloat16_to_float(x); }
  static Stored store(Wide x) { return float_to_bfloat16(x); }
};

// Signed overflow wraps, as it does in torch.
template <class W>
using Wrapping = typename std::conditional_t<std::is_integral_v<W>, std::make_unsigned<W>, std::type_identity<W>>::type;

template <class W>
struct Sum {
  static W apply(W a, W b) { return static_cast<W>(static_cast<Wrapping<W>>(a) + static_cast<Wrapping<W>>(b)); }
};
template <class W>
struct Product {
  static W apply(W a, W b) {
    if constexpr (std::is_integral_v<W>) {
      return static_cast<W>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
template <class W>
struct Min {
  static W apply(W a, W b) { return (b < a || b != b) ? b : a; }
};
template <class W>
struct Max {
  static W apply(W a, W b) { return (a < b || b != b) ? b : a; }
};
template <class W>
struct BitAnd {
  static W apply(W a, W b) { return static_cast<W>(a & b); }
};
template <class W>
struct BitOr {
  static W apply(W a, W b) { return static_cast<W>(a | b); }
};
template <class W>
struct BitXor {
  static W apply(W a, W b) { return static_cast<W>(a ^ b); }
};
struct Identity {
  template <class W>
  static W apply(W x, double) {
    return x;
  }
};
struct Divide {
  template <class W>
  static W apply(W x, double divisor) {
    if constexpr (std::is_integral_v<W>) {
      using Widest = std::conditional_t<std::is_signed_v<W>, int64_t, uint64_t>;  // the world may not fit W
      return static_cast<W>(static_cast<Widest>(x) / static_cast<Widest>(divisor));
    } else {
      return x / static_cast<W>(divisor);
    }
  }
};

template <class Format, template <class> class Op, class After>
inline __attribute__((always_inline)) void loop(void* out, const void* a, const void* b, size_t count, double divisor) {
  using Stored = typename Format::Stored;
  auto* o = static_cast<unsigned char*>(out);
  const auto* x = static_cast<const unsigned char*>(a);
  const auto* y = static_cast<const unsigned char*>(b);
  for (size_t i = 0; i < count; ++i) {
    Stored u, v;
    std::memcpy(&u, x + i * sizeof(Stored), sizeof(Stored));
    std::memcpy(&v, y + i * sizeof(Stored), sizeof(Stored));
    const auto wide = Op<typename Format::Wide>::apply(Format::load(u), Format::load(v));
    const Stored result = Format::store(After::apply(wide, divisor));
    std::memcpy(o + i * sizeof(Stored), &result, sizeof(Stored));
  }
}

template <class Format, template <class> class Op, class After>
MCCL_CLONES void kernel(void* out, const void* a, const void* b, size_t count, double divisor) {
  // The compiler vectorizes each branch; the second tells it that out and a are one array.
  if (out == a) {
    loop<Format, Op, After>(out, out, b, count, divisor);
  } else {
    loop<Format, Op, After>(out, a, b, count, divisor);
  }
}

[[noreturn]] void unsupported(DType dtype, ReduceOp op, const char* advice) {
  throw_usage(std::string(to_string(op)) + " is not defined for " + to_string(dtype), advice);
}

template <class Format, template <class> class Op>
ReduceKernels plain_kernels() {
  return {kernel<Format, Op, Identity>, kernel<Format, Op, Identity>};
}

template <class Format>
ReduceKernels arithmetic_kernels(DType dtype, ReduceOp op) {
  using Wide = typename Format::Wide;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum: return plain_kernels<Format, Sum>();
    case ReduceOp::kAvg: return {kernel<Format, Sum, Identity>, kernel<Format, Sum, Divide>};
    case ReduceOp::kProduct: return plain_kernels<Format, Product>();
    case ReduceOp::kMin: return plain_kernels<Format, Min>();
    case ReduceOp::kMax: return plain_kernels<Format, Max>();
    default: break;
  }
  if constexpr (std::is_integral_v<Wide>) {
    switch (op) {
      case ReduceOp::kBitAnd: return plain_kernels<Format, BitAnd>();
      case ReduceOp::kBitOr: return plain_kernels<Format, BitOr>();
      case ReduceOp::kBitXor: return plain_kernels<Format, BitXor>();
      default: break;
    }
  }
  unsupported(dtype, op, "Use an integer tensor for bitwise operators");
}

ReduceKernels bool_kernels(ReduceOp op) {
  using Byte = Plain<uint8_t>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr: return plain_kernels<Byte, BitOr>();
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd: return plain_kernels<Byte, BitAnd>();
    case ReduceOp::kBitXor: return plain_kernels<Byte, BitXor>();
    default: unsupported(DType::kBool, op, "Convert the tensor to a number type first");
  }
}

}  // namespace

const char* to_string(DType dtype) {
  static constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16", "int8",   "uint8", "int16",
                                           "uint16",  "int32",   "uint32",  "int64",    "uint64", "bool"};
  return dtype < DType::kCount ? kNames[static_cast<size_t>(dtype)] : "unknown dtype";
}

const char* to_string(ReduceOp op) {
  static constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < ReduceOp::kCount ? kNames[static_cast<size_t>(op)] : "unknown op";
}

const char* to_string(Compression compression) {
  static constexpr const char* kNames[] = {"none", "fp16", "bf16", "topk"};
  return compression < Compression::kCount ? kNames[static_cast<size_t>(compression)] : "unknown compression";
}

size_t element_nbytes(DType dtype) {
  static constexpr size_t kSizes[] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1};
  MCCL_ASSERT(dtype < DType::kCount);
  return kSizes[static_cast<size_t>(dtype)];
}

namespace {
ReduceKernels loops(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32: return arithmetic_kernels<Plain<float>>(dtype, op);
    case DType::kFloat64: return arithmetic_kernels<Plain<double>>(dtype, op);
    case DType::kFloat16: return arithmetic_kernels<Half>(dtype, op);
    case DType::kBFloat16: return arithmetic_kernels<Brain>(dtype, op);
    case DType::kInt8: return arithmetic_kernels<Plain<int8_t>>(dtype, op);
    case DType::kUInt8: return arithmetic_kernels<Plain<uint8_t>>(dtype, op);
    case DType::kInt16: return arithmetic_kernels<Plain<int16_t>>(dtype, op);
    case DType::kUInt16: return arithmetic_kernels<Plain<uint16_t>>(dtype, op);
    case DType::kInt32: return arithmetic_kernels<Plain<int32_t>>(dtype, op);
    case DType::kUInt32: return arithmetic_kernels<Plain<uint32_t>>(dtype, op);
    case DType::kInt64: return arithmetic_kernels<Plain<int64_t>>(dtype, op);
    case DType::kUInt64: return arithmetic_kernels<Plain<uint64_t>>(dtype, op);
    case DType::kBool: return bool_kernels(op);
    case DType::kCount: break;
  }
  throw_usage("unknown dtype");
}
}  // namespace

ReduceKernels reduce_kernels(DType dtype, ReduceOp op) {
  ReduceKernels kernels = loops(dtype, op);
  const bool finishes_as_sum = op == ReduceOp::kSum || op == ReduceOp::kPremulSum;
  if (!finishes_as_sum && op != ReduceOp::kAvg) return kernels;
  if (const ReduceFn sum = vector_sum(dtype)) {
    kernels.combine = sum;
    if (finishes_as_sum) kernels.finish = sum;
  }
  return kernels;
}

}  // namespace mccl
