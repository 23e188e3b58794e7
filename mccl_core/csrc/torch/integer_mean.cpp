#include "torch/integer_mean.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <type_traits>

namespace mccl {

namespace {
bool is_64_bit(at::ScalarType type) { return type == at::kLong || type == at::kUInt64; }

// Calls `body` with a value of the element type.
template <class Body>
void with_type(at::ScalarType type, const Body& body) {
  switch (type) {
    case at::kChar: return body(int8_t{});
    case at::kByte: return body(uint8_t{});
    case at::kShort: return body(int16_t{});
    case at::kUInt16: return body(uint16_t{});
    case at::kInt: return body(int32_t{});
    case at::kUInt32: return body(uint32_t{});
    case at::kLong: return body(int64_t{});
    case at::kUInt64: return body(uint64_t{});
    default: TORCH_INTERNAL_ASSERT(false, "not an integer type");
  }
}

// (world * quotients + remainders) / world, towards zero; neither product nor sum may be formed.
template <class T>
T mean(T quotients, T remainders, T world) {
  T carry = remainders / world;
  T rest = remainders % world;
  if constexpr (std::is_signed_v<T>) {
    if (rest < 0) {  // now 0 <= rest < world
      rest += world;
      --carry;
    }
    const T floor = quotients + carry;
    return floor < 0 && rest > 0 ? floor + 1 : floor;
  } else {
    return quotients + carry;
  }
}
}  // namespace

bool averages_as_integers(at::ScalarType type) { return c10::isIntegralType(type, /*includeBool=*/false); }

at::Tensor empty_widened(const at::Tensor& like) {
  return at::empty({like.numel() * (is_64_bit(like.scalar_type()) ? 2 : 1)}, like.options().dtype(at::kLong));
}

at::Tensor widened(const at::Tensor& tensor, int64_t world) {
  const at::Tensor values = tensor.contiguous();
  const at::Tensor wide = empty_widened(tensor);
  const int64_t count = values.numel();
  auto* out = static_cast<int64_t*>(wide.data_ptr());
  with_type(values.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto* in = static_cast<const T*>(values.const_data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (sizeof(T) < sizeof(int64_t)) {
        out[i] = static_cast<int64_t>(in[i]);
      } else {
        out[i] = static_cast<int64_t>(in[i] / static_cast<T>(world));
        out[count + i] = static_cast<int64_t>(in[i] % static_cast<T>(world));
      }
    }
  });
  return wide;
}

void write_means(const at::Tensor& sums, const at::Tensor& into, int64_t world) {
  const at::Tensor means = into.is_contiguous() ? into : at::empty_like(into, at::MemoryFormat::Contiguous);
  const int64_t count = into.numel();
  const auto* in = static_cast<const int64_t*>(sums.const_data_ptr());
  with_type(into.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    auto* out = static_cast<T*>(means.data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (sizeof(T) < sizeof(int64_t)) {
        out[i] = static_cast<T>(in[i] / world);
      } else {
        out[i] = mean(static_cast<T>(in[i]), static_cast<T>(in[count + i]), static_cast<T>(world));
      }
    }
  });
  if (!into.is_contiguous()) into.copy_(means);
}

}  // namespace mccl
