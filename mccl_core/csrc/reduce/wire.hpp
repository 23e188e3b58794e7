// Elements that are fp32 or fp64 in memory and fp16 or bf16 on the wire.
//
// Narrowing rounds to nearest even. A finite value beyond the wire format's range becomes the largest one of its sign,
// never infinity; infinities stay, and every NaN becomes the same one. What is added is added in the memory's type.
#pragma once

#include <cstddef>

#include "reduce/types.hpp"

namespace mccl {

// `wide`, `own`, `out`: elements in memory. `wire`, `in`: 16-bit elements. Pointers need no alignment and must not
// overlap, but for `own` and `out` of `deliver`, which may be one. Where a size is returned it is the number of
// elements that were clipped.
struct WireKernels {
  // wire = narrow(scale · wide).
  size_t (*narrow)(void* wire, const void* wide, size_t count, double scale);
  // wire = narrow(wide); rounds `wide` itself to what the others get.
  size_t (*narrow_through)(void* wire, void* wide, size_t count);
  void (*widen)(void* wide, const void* in, size_t count);
  // wide += in; wire = narrow(wide).
  size_t (*accumulate)(void* wire, void* wide, const void* in, size_t count);
  // As accumulate, and rounds `wide` itself to what the others get.
  size_t (*accumulate_through)(void* wire, void* wide, const void* in, size_t count);
  // wire = narrow(in + scale · own).
  size_t (*forward)(void* wire, const void* own, const void* in, size_t count, double scale);
  // out = in + scale · own.
  void (*deliver)(void* out, const void* own, const void* in, size_t count, double scale);
  void (*multiply)(void* wide, size_t count, double factor);
};

// `memory`: fp32 or fp64. `wire`: fp16 or bf16. Throws Error (kUsage) for others.
WireKernels wire_kernels(DType memory, Compression wire);

}  // namespace mccl
