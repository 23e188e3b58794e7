#include "torch/work.hpp"

#include <c10/util/Exception.h>

#include "torch/devices.hpp"

namespace mccl {

void throw_dist_backend_error(const Error& error) { C10_THROW_ERROR(DistBackendError, error.what()); }

namespace {
std::exception_ptr as_exception(const Error& error) {
  try {
    throw_dist_backend_error(error);
  } catch (...) {
    return std::current_exception();
  }
}
}  // namespace

OpWork::OpWork(int rank, c10d::OpType type, std::shared_ptr<Operation> op, std::vector<at::Tensor> outputs,
               std::shared_ptr<Leavings> leavings, OnDevice on_device)
    : c10d::Work(rank, type),
      op_(std::move(op)),
      outputs_(std::move(outputs)),
      leavings_(std::move(leavings)),
      on_device_(std::move(on_device)) {}

bool OpWork::isCompleted() { return op_->state() != OpState::kInFlight; }
bool OpWork::isSuccess() const { return op_->state() == OpState::kDone; }

std::exception_ptr OpWork::exception() const {
  const auto error = op_->error();
  return error ? as_exception(*error) : nullptr;
}

int OpWork::sourceRank() const { return source_; }
std::vector<at::Tensor> OpWork::result() { return outputs_; }
void OpWork::synchronize() { wait(kNoTimeout); }

bool OpWork::wait(std::chrono::milliseconds timeout) {
  if (on_device_.ticket) wait_on_stream();
  if (!on_device_.ticket || timeout != kNoTimeout || op_->state() == OpState::kFailed) wait_on_host(timeout);
  return true;
}

void OpWork::wait_on_stream() {
  adopt_autograd_thread(*on_device_.hand_off);
  try {
    on_device_.hand_off->wait_released(on_device_.ticket);
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.info().code != Code::kUsage, error.what());
    throw_dist_backend_error(error);
  }
}

void OpWork::wait_on_host(std::chrono::milliseconds timeout) {
  try {
    if (op_->wait(timeout == kNoTimeout ? -1 : timeout.count())) {
      leavings_->take_away();
      return;
    }
  } catch (const Error& error) {
    throw_dist_backend_error(error);
  }
  ErrorInfo info;
  info.code = Code::kTimeout;
  info.rank = rank_;
  info.op = to_string(op_->fingerprint.kind);
  info.ticket = op_->ticket;
  info.detail = "Work.wait() gave up after " + std::to_string(timeout.count()) + " ms; the op itself goes on";
  throw_dist_backend_error(Error(std::move(info)));
}

void OpWork::abort() { TORCH_CHECK(false, "mccl: one op cannot be aborted; abort its process group"); }

c10::intrusive_ptr<c10::ivalue::Future> OpWork::getFuture() {
  std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  op_->on_settled([future = future_, op = op_.get(), outputs = outputs_] {
    if (const auto error = op->error()) {
      future->setError(as_exception(*error));
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  });
  return future_;
}

uint64_t OpWork::getSequencenumber() const { return op_->ticket; }

}  // namespace mccl
