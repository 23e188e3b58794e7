// Sums by whatever adds fastest on this machine (reduce/vector_sum.hpp) against plain arithmetic, bit for bit. Built
// for arm64, too (NEON), and with MCCL_ACCELERATE over functions that play vDSP.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "reduce/half.hpp"
#include "reduce/reduce.hpp"

#ifdef MCCL_ACCELERATE
static int vdsp_calls = 0;
template <class T>
static void add(const T* a, const T* b, T* out, unsigned long count) {
  ++vdsp_calls;
  for (unsigned long i = 0; i < count; ++i) out[i] = a[i] + b[i];
}
extern "C" void vDSP_vadd(const float* a, long, const float* b, long, float* out, long, unsigned long count) {
  add(a, b, out, count);
}
extern "C" void vDSP_vaddD(const double* a, long, const double* b, long, double* out, long, unsigned long count) {
  add(a, b, out, count);
}
#endif

using namespace mccl;

namespace {

int failures = 0;

void check(bool holds, const char* what, DType dtype, size_t at) {
  if (holds || ++failures > 10) return;
  std::printf("%s: %s, element %zu\n", to_string(dtype), what, at);
}

uint16_t sum(DType dtype, uint16_t a, uint16_t b) {
  if (dtype == DType::kFloat16) return float_to_half(half_to_float(a) + half_to_float(b));
  return float_to_bfloat16(bfloat16_to_float(a) + bfloat16_to_float(b));
}
float sum(DType, float a, float b) { return a + b; }
double sum(DType, double a, double b) { return a + b; }

bool is_nan(DType dtype, uint16_t x) {
  return std::isnan(dtype == DType::kFloat16 ? half_to_float(x) : bfloat16_to_float(x));
}
bool is_nan(DType, double x) { return std::isnan(x); }

// NaN is NaN: which of two it is may differ.
template <class T>
bool same(DType dtype, T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (is_nan(dtype, a) && is_nan(dtype, b));
}

// All kernels that add, at every alignment and in place.
template <class T>
void check_sums(DType dtype, const std::vector<T>& a, const std::vector<T>& b) {
  const size_t count = a.size();
  std::vector<unsigned char> x(count * sizeof(T) + 8), y(x.size()), out(x.size());
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kPremulSum, ReduceOp::kAvg}) {
    const ReduceKernels kernels = reduce_kernels(dtype, op);
    for (const size_t shift : {size_t{0}, size_t{1}, sizeof(T)}) {
      std::memcpy(x.data() + shift, a.data(), count * sizeof(T));
      std::memcpy(y.data(), b.data(), count * sizeof(T));
      kernels.combine(out.data() + shift, x.data() + shift, y.data(), count, 1);
      kernels.combine(x.data() + shift, x.data() + shift, y.data(), count, 1);
      for (size_t i = 0; i < count; ++i) {
        T found, in_place;
        std::memcpy(&found, out.data() + shift + i * sizeof(T), sizeof(T));
        std::memcpy(&in_place, x.data() + shift + i * sizeof(T), sizeof(T));
        check(same(dtype, found, sum(dtype, a[i], b[i])), "a wrong sum", dtype, i);
        check(same(dtype, in_place, found), "another sum in place", dtype, i);
      }
      if (op == ReduceOp::kAvg) continue;
      kernels.finish(out.data() + shift, y.data(), y.data(), count, 1);
      for (size_t i = 0; i < count; ++i) {
        T found;
        std::memcpy(&found, out.data() + shift + i * sizeof(T), sizeof(T));
        check(same(dtype, found, sum(dtype, b[i], b[i])), "a wrong last sum", dtype, i);
      }
    }
  }
}

// Every bit pattern once, against a few that stand for their kinds.
void check_half_types() {
  std::vector<uint16_t> all(65536 + 5);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const uint16_t other : {0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3F80, 0xBC01, 0x7BFF, 0x7C00, 0xFC00,
                                 0x7E00, 0x7F7F, 0x7F80, 0x7FC1, 0x1234}) {
      check_sums(dtype, all, std::vector<uint16_t>(all.size(), other));
    }
  }
}

template <class T>
void check_wide_type(DType dtype) {
  std::mt19937_64 random(7);
  std::vector<T> a(10'007), b(a.size());
  for (auto* values : {&a, &b}) {
    for (T& value : *values) {
      const uint64_t bits = random();
      std::memcpy(&value, &bits, sizeof(T));
    }
  }
  check_sums(dtype, a, b);
}

}  // namespace

int main() {
  check_half_types();
  check_wide_type<float>(DType::kFloat32);
  check_wide_type<double>(DType::kFloat64);
#ifdef MCCL_ACCELERATE
  if (vdsp_calls == 0) ++failures, std::puts("vDSP was never called");
#endif
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
