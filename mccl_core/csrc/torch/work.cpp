#include "torch/work.hpp"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "engine/group.hpp"
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

c10d::WorkResult result_of(const Operation& op) {
  const auto error = op.error();
  if (!error) return c10d::WorkResult::SUCCESS;
  return error->info().code == Code::kTimeout ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
}

// Nothing is copied where nobody profiles.
const char* title_of(const WorkDescription& description) { return at::hasCallbacks() ? description.title : nullptr; }

std::optional<std::vector<at::Tensor>> inputs_of(const WorkDescription& description) {
  if (description.inputs.empty() || !at::hasCallbacks()) return std::nullopt;
  return description.inputs;
}

using Future = c10::ivalue::Future;

c10::intrusive_ptr<Future> future_of_tensors() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}
}  // namespace

OpWork::OpWork(WorkDescription description, std::shared_ptr<Operation> op)
    : c10d::Work(description.rank, description.type, title_of(description), inputs_of(description)),
      op_(std::move(op)),
      outputs_(std::move(description.outputs)),
      report_(std::move(description.report)),
      leavings_(std::move(description.leavings)) {}

void OpWork::watch_for_profiler() {
  if (!recordFunctionEndCallback_) return;
  op_->on_settled([self = c10::intrusive_ptr<OpWork>::unsafe_reclaim_from_nonowning(this)] { self->end_profile(); });
}

// Before wait() returns, so that a profiler that is left then has seen it.
void OpWork::end_profile() {
  if (recordFunctionEndCallback_ && !profiled_.exchange(true)) recordFunctionEndCallback_();
}

bool OpWork::isCompleted() { return op_->state() != OpState::kInFlight; }
bool OpWork::isSuccess() const { return op_->state() == OpState::kDone; }

std::exception_ptr OpWork::exception() const {
  const auto error = op_->error();
  return error ? as_exception(*error) : nullptr;
}

int OpWork::sourceRank() const {
  if (source_ >= 0 || op_->state() == OpState::kInFlight) return source_;
  return op_->source;
}

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
    report_->failed(error);
    throw_dist_backend_error(error);
  }
}

void OpWork::wait_on_host(std::chrono::milliseconds timeout) {
  try {
    if (op_->wait(timeout == kNoTimeout ? -1 : timeout.count())) {
      end_profile();
      leavings_->take_away();
      return;
    }
  } catch (const Error& error) {
    end_profile();
    report_->failed(error);
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

c10::intrusive_ptr<Future> OpWork::getFuture() {
  std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  future_ = future_of_tensors();
  op_->on_settled([future = future_, op = op_.get(), outputs = outputs_, report = report_] {
    if (const auto error = op->error()) {
      report->failed(*error);
      future->setError(as_exception(*error));
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  });
  return future_;
}

c10::intrusive_ptr<Future> OpWork::getFutureResult() {
  auto future = c10::make_intrusive<Future>(c10::IntType::get());
  op_->on_settled([future, op = op_.get()] { future->markCompleted(static_cast<int64_t>(result_of(*op))); });
  return future;
}

float OpWork::getDuration() const {
  TORCH_CHECK(op_->state() != OpState::kInFlight, "mccl: get_duration: the op is still in flight; wait() for it first");
  return static_cast<float>(op_->settled_at - op_->posted_at) / 1e6f;
}

uint64_t OpWork::getSequencenumber() const { return op_->ticket; }

Place OpWork::place() const {
  if (op_->fingerprint.kind == OpKind::kPointToPoint) return {};
  return place_of(op_->group->id, op_->ticket, op_->nested.tag);
}

bool CoalescedWork::isCompleted() {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto exception = work->exception()) return exception;
  }
  return nullptr;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> tensors;
  for (const auto& work : works_) {
    const auto some = work->result();
    tensors.insert(tensors.end(), some.begin(), some.end());
  }
  return tensors;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

void CoalescedWork::abort() { TORCH_CHECK(false, "mccl: one op cannot be aborted; abort its process group"); }

c10::intrusive_ptr<Future> CoalescedWork::getFuture() {
  auto future = future_of_tensors();
  const auto left = std::make_shared<std::atomic<size_t>>(works_.size() + 1);
  const auto over = [future, left, tensors = result()] {
    if (--*left == 0 && !future->completed()) future->markCompleted(c10::IValue(tensors));
  };
  for (const auto& work : works_) {
    work->getFuture()->addCallback([future, over](Future& one) {
      if (one.hasError()) {
        future->setErrorIfNeeded(one.exception_ptr());
      }
      over();
    });
  }
  over();
  return future;
}

float CoalescedWork::getDuration() const {
  float longest = 0;
  for (const auto& work : works_) longest = std::max(longest, work->getDuration());
  return longest;
}

uint64_t CoalescedWork::getSequencenumber() const { return works_.empty() ? 0 : works_.back()->getSequencenumber(); }

}  // namespace mccl
