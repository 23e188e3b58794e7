#include "torch/tensors.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "torch/devices.hpp"
#include "torch/integer_mean.hpp"

namespace mccl {

namespace {
std::optional<DType> known_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kChar: return DType::kInt8;
    case at::kByte: return DType::kUInt8;
    case at::kShort: return DType::kInt16;
    case at::kUInt16: return DType::kUInt16;
    case at::kInt: return DType::kInt32;
    case at::kUInt32: return DType::kUInt32;
    case at::kLong: return DType::kInt64;
    case at::kUInt64: return DType::kUInt64;
    case at::kBool: return DType::kBool;
    default: return std::nullopt;
  }
}
}  // namespace

DType reduction_dtype(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name) {
  at::ScalarType type = tensor.scalar_type();
  if (tensor.is_complex()) {
    TORCH_CHECK(c10d::isComplexViewAsRealAllowed(op), "mccl: ", name, ": this reduce op is not defined for ", type,
                " tensors. Use SUM, AVG or PREMUL_SUM");
    type = c10::toRealValueType(type);
  }
  const auto dtype = known_dtype(type);
  TORCH_CHECK_TYPE(dtype.has_value(), "mccl: ", name, ": cannot reduce ", tensor.scalar_type(),
                   " tensors. Convert to a floating-point, integer, bool or complex type first");
  return *dtype;
}

DType transport_dtype(const at::Tensor& tensor) { return known_dtype(tensor.scalar_type()).value_or(DType::kUInt8); }

std::optional<std::byte> nan_byte_of(at::ScalarType type) {
  if (type == at::kFloat8_e4m3fnuz || type == at::kFloat8_e5m2fnuz) return std::byte{0x80};
  if (at::isFloatingType(type) || at::isComplexType(type)) return std::byte{0xFF};
  return std::nullopt;
}

ReduceOp reduce_op(const c10d::ReduceOp& op, const char* name) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR: return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR: return ReduceOp::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM: return ReduceOp::kPremulSum;
    default: break;
  }
  TORCH_CHECK(false, "mccl: ", name, ": unknown reduce op");
}

void check_tensor(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "mccl: ", name, ": got a sparse tensor; call .to_dense() first");
  TORCH_CHECK(reaches(tensor.device()), "mccl: ", name, ": got a tensor on ", tensor.device(),
              "; mccl moves tensors of ", reaches(at::kMPS) ? "the CPU and of MPS" : "the CPU only",
              " here. Use .cpu(), or NCCL for CUDA");
}

void check_same(const at::Tensor& tensor, const at::Tensor& like, const char* name) {
  check_tensor(tensor, name);
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), "mccl: ", name, ": tensors of ", like.scalar_type(),
                   " and ", tensor.scalar_type(), " in one call; use one dtype");
}

Buffer buffer_of(const at::Tensor& contiguous) {
  return {static_cast<std::byte*>(contiguous.data_ptr()), static_cast<uint64_t>(contiguous.nbytes())};
}

namespace {
void check_divisible(const at::Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK_VALUE(tensor.numel() % count == 0, "mccl: ", name, ": a tensor of ", tensor.numel(),
                    " elements cannot be split over ", count, " ranks; its size must be a multiple of the world size");
}
}  // namespace

std::vector<at::Tensor> pieces_of(const at::Tensor& tensor, int64_t count, const char* name) {
  check_divisible(tensor, count, name);
  const at::Tensor flat = tensor.contiguous().view({-1});
  const int64_t numel = tensor.numel() / count;
  std::vector<at::Tensor> pieces;
  for (int64_t i = 0; i < count; ++i) pieces.push_back(flat.narrow(0, i * numel, numel));
  return pieces;
}

std::vector<Buffer> slices_of(const at::Tensor& contiguous, int64_t count, const char* name) {
  check_divisible(contiguous, count, name);
  const Buffer whole = buffer_of(contiguous);
  const uint64_t nbytes = whole.nbytes / static_cast<uint64_t>(count);
  std::vector<Buffer> slices;
  for (int64_t i = 0; i < count; ++i) slices.push_back({whole.data + static_cast<uint64_t>(i) * nbytes, nbytes});
  return slices;
}

namespace {
void check_writable(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "mccl: the result cannot be written: elements of this tensor share memory (expand?). "
                    "Use .contiguous() first");
}
}  // namespace

at::Tensor Staging::on_host(const at::Tensor& contiguous, bool written) {
  kept_.push_back(contiguous);
  Shim* const shim = shim_of(contiguous);
  TORCH_CHECK_VALUE(shim_.value_or(shim) == shim, "mccl: tensors of the CPU and of ", contiguous.device(),
                    " in one call; move all of them to one device");
  shim_ = shim;
  if (shim == nullptr) return contiguous;
  views_.push_back(shim->host_view(device_tensor(contiguous, written)));
  return at::from_blob(views_.back().memory.data, contiguous.sizes(), contiguous.options().device(at::kCPU));
}

at::Tensor Staging::input(const at::Tensor& tensor) { return on_host(tensor.contiguous(), false); }

at::Tensor Staging::output(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return on_host(tensor, true);
  check_writable(tensor);
  copy_back_.push_back({at::empty_like(tensor, at::MemoryFormat::Contiguous), tensor});
  return on_host(copy_back_.back().staged, true);
}

at::Tensor Staging::in_place(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return on_host(tensor, true);
  check_writable(tensor);
  copy_back_.push_back({tensor.contiguous(), tensor});
  return on_host(copy_back_.back().staged, true);
}

at::Tensor Staging::widened_input(const at::Tensor& tensor, int64_t world) {
  return on_host(widened(tensor, world), false);
}

at::Tensor Staging::widened_output(const at::Tensor& tensor, int64_t world) {
  check_writable(tensor);
  const at::Tensor sums = empty_widened(tensor);
  then([sums, tensor, world] {
    const at::NoGradGuard no_grad;
    const c10::InferenceMode inference(tensor.is_inference());
    write_means(sums, tensor, world);
  });
  return on_host(sums, true);
}

at::Tensor Staging::widened_in_place(const at::Tensor& tensor, int64_t world) {
  const at::Tensor sums = widened_output(tensor, world);
  sums.copy_(widened(tensor, world));
  return sums;
}

bool Staging::kernels_finish() const {
  const auto is_copied = [](const HostView& view) { return view.staging && view.tensor.written; };
  return shim() != nullptr && (!copy_back_.empty() || std::ranges::any_of(views_, is_copied));
}

std::function<void()> Staging::finish() const {
  if (copy_back_.empty()) return nullptr;
  return [pairs = copy_back_] {
    at::NoGradGuard no_grad;
    for (const Pair& pair : pairs) {
      const c10::InferenceMode inference(pair.original.is_inference());
      pair.original.copy_(pair.staged);
    }
  };
}

}  // namespace mccl
