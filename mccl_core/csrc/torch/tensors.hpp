// Tensors as the core sees them: buffers, element types, staging for what is not contiguous.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "device/shim.hpp"
#include "engine/buffers.hpp"
#include "reduce/types.hpp"

namespace mccl {

// For reductions: the tensor must have an element type that we can compute with (complex ones as pairs, where the
// operator allows it). Throws c10 errors that name the op.
DType reduction_dtype(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name);
// For moving bytes: a type we do not compute with travels as bytes.
DType transport_dtype(const at::Tensor& tensor);
// The byte that a NaN of this type may consist of; none for types that have no NaN.
std::optional<std::byte> nan_byte_of(at::ScalarType type);
ReduceOp reduce_op(const c10d::ReduceOp& op, const char* name);
// Dense, on a device that this build reaches.
void check_tensor(const at::Tensor& tensor, const char* name);
void check_same(const at::Tensor& tensor, const at::Tensor& like, const char* name);

Buffer buffer_of(const at::Tensor& contiguous);
// `count` equal slices of a contiguous tensor.
std::vector<Buffer> slices_of(const at::Tensor& contiguous, int64_t count, const char* name);

// `count` equal pieces of the tensor's elements, each of one dimension: views where it is contiguous.
std::vector<at::Tensor> pieces_of(const at::Tensor& tensor, int64_t count, const char* name);

// Contiguous stand-ins for the caller's tensors, as the engine sees them: for a tensor on a device the one returned is
// its memory on the host, and only that. Inputs are copied in; outputs are copied back by finish().
class Staging {
 public:
  at::Tensor input(const at::Tensor& tensor);
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor in_place(const at::Tensor& tensor);
  // For AVG of integers on the CPU: what travels in the tensor's stead (integer_mean.hpp).
  at::Tensor widened_input(const at::Tensor& tensor, int64_t world);
  at::Tensor widened_output(const at::Tensor& tensor, int64_t world);
  at::Tensor widened_in_place(const at::Tensor& tensor, int64_t world);
  // Runs before the op is done, on the engine's completion thread, unless it has failed. For the CPU's tensors.
  void then(std::function<void()> last) { last_.push_back(std::move(last)); }
  const std::vector<std::function<void()>>& last() const { return last_; }
  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }
  // Null where nothing has to be copied back. On a device it encodes the copies.
  std::function<void()> finish() const;
  // Whether kernels of a device bring the result to its place, behind the op.
  bool kernels_finish() const;
  std::vector<at::Tensor> kept() const { return kept_; }
  // Of the tensors' device; null for the CPU's.
  Shim* shim() const { return shim_.value_or(nullptr); }
  const std::vector<HostView>& views() const { return views_; }

 private:
  at::Tensor on_host(const at::Tensor& contiguous, bool written);

  struct Pair {
    at::Tensor staged;
    at::Tensor original;
  };
  std::vector<at::Tensor> kept_;
  std::vector<Pair> copy_back_;
  std::vector<std::function<void()>> last_;
  std::optional<Shim*> shim_;  // once there is a tensor
  std::vector<HostView> views_;
};

}  // namespace mccl
