#include "reduce/accelerate.hpp"

// The tests define MCCL_ACCELERATE and play vDSP.
#if defined(__APPLE__) || defined(MCCL_ACCELERATE)

#include <cstdint>
#include <cstring>

// By hand: the header comes with Apple's SDK alone.
extern "C" {
void vDSP_vadd(const float* a, long stride_a, const float* b, long stride_b, float* out, long stride_out,
               unsigned long count);
void vDSP_vaddD(const double* a, long stride_a, const double* b, long stride_b, double* out, long stride_out,
                unsigned long count);
}

namespace mccl {

namespace {
template <class T>
void sum(void* out, const void* a, const void* b, size_t count,
         void (*add)(const T*, long, const T*, long, T*, long, unsigned long)) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  if ((address(out) | address(a) | address(b)) % alignof(T) == 0) {
    add(static_cast<const T*>(a), 1, static_cast<const T*>(b), 1, static_cast<T*>(out), 1, count);
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    T x, y;
    std::memcpy(&x, static_cast<const char*>(a) + i * sizeof(T), sizeof(T));
    std::memcpy(&y, static_cast<const char*>(b) + i * sizeof(T), sizeof(T));
    x += y;
    std::memcpy(static_cast<char*>(out) + i * sizeof(T), &x, sizeof(T));
  }
}
}  // namespace

void accelerate_sum_float(void* out, const void* a, const void* b, size_t count, double) {
  sum<float>(out, a, b, count, vDSP_vadd);
}

void accelerate_sum_double(void* out, const void* a, const void* b, size_t count, double) {
  sum<double>(out, a, b, count, vDSP_vaddD);
}

}  // namespace mccl

#endif
