// Several tensors in one call, and several calls behind one work.
#include <algorithm>
#include <utility>

#include "torch/process_group.hpp"

namespace mccl {

namespace {
// The tensors' indices by element type, in the order in which types first occur: one op has one element type. With
// `apart` each stands alone.
std::vector<std::vector<size_t>> by_dtype(const std::vector<at::Tensor>& tensors, const char* name,
                                          bool apart = false) {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(tensors[i], name);
    const auto same = [&](const auto& group) {
      return !apart && tensors[group[0]].scalar_type() == tensors[i].scalar_type();
    };
    const auto found = std::find_if(groups.begin(), groups.end(), same);
    if (found == groups.end()) {
      groups.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return groups;
}

// Of all tensors, or bytes where there are several.
DType common_dtype(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.scalar_type() != tensors[0].scalar_type()) return DType::kUInt8;
  }
  return transport_dtype(tensors[0]);
}

ProcessGroupMCCL::WorkPtr one_of(int rank, std::vector<ProcessGroupMCCL::WorkPtr> works) {
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<CoalescedWork>(rank, std::move(works));
}
}  // namespace

void ProcessGroupMCCL::startCoalescing() {
  const std::lock_guard guard(coalescing_mutex_);
  TORCH_CHECK(!coalescing_, "mccl: a coalescing block of this group is open already; they cannot be nested");
  coalescing_.emplace();
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::endCoalescing() {
  const std::lock_guard guard(coalescing_mutex_);
  TORCH_CHECK(coalescing_, "mccl: no coalescing block of this group is open");
  std::vector<WorkPtr> works = std::move(*coalescing_);
  coalescing_.reset();
  return c10::make_intrusive<CoalescedWork>(rank_, std::move(works));
}

// One op a dtype: its address space is the concatenation of the tensors.
ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allreduce_coalesced(Tensors& tensors,
                                                                const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "mccl: all_reduce_coalesced: got no tensors");
  std::vector<WorkPtr> works;
  for (const auto& indices : by_dtype(tensors, "all_reduce_coalesced")) {
    const Reduction reduction = reduction_of(tensors[indices[0]], opts.reduceOp, "all_reduce_coalesced");
    Staging staging;
    std::vector<Buffer> buffers;
    Tensors some;
    for (const size_t i : indices) {
      some.push_back(tensors[i]);
      buffers.push_back(buffer_of(reduced_in_place(staging, tensors[i], opts.reduceOp, reduction)));
    }
    works.push_back(start(
        {c10d::OpType::ALLREDUCE_COALESCED, titles_.all_reduce, opts.timeout, some, some}, staging,
        [&] { return finish(compressor_.all_reduce(planner_, me(), some, buffers, reduction.elements), reduction); }));
  }
  return one_of(rank_, std::move(works));
}

// outputs[r] holds what rank r gave: one tensor for each of the inputs.
ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& opts) {
  const char* name = "all_gather_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty(), "mccl: ", name, ": got no tensors");
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), "mccl: ", name, ": got ", outputs.size(),
                    " output lists in a group of ", size_, "; give one for each rank");
  Staging staging;
  std::vector<Buffer> in, out;
  Tensors all;
  for (const at::Tensor& input : inputs) {
    check_tensor(input, name);
    in.push_back(buffer_of(staging.input(input)));
  }
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "mccl: ", name, ": an output list has ", list.size(),
                      " tensors, but there are ", inputs.size(), " inputs");
    for (size_t i = 0; i < list.size(); ++i) {
      check_same(list[i], inputs[i], name);
      out.push_back(buffer_of(staging.output(list[i])));
      all.push_back(list[i]);
    }
  }
  return start({c10d::OpType::ALLGATHER_COALESCED, titles_.all_gather, opts.timeout, inputs, all}, staging,
               [&] { return all_gather(planner_, me(), in, out, common_dtype(inputs)); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::AllgatherOptions& opts) {
  const char* name = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "mccl: ", name, ": got ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs; give one output for each input, at least one");
  Staging staging;
  std::vector<Buffer> in, out;
  std::vector<std::vector<Buffer>> slices;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], name);
    check_same(outputs[i], inputs[i], name);
    in.push_back(buffer_of(staging.input(inputs[i])));
    slices.push_back(slices_of(staging.output(outputs[i]), size_, name));
  }
  for (size_t rank = 0; rank < static_cast<size_t>(size_); ++rank) {
    for (const auto& of_output : slices) out.push_back(of_output[rank]);
  }
  return start({c10d::OpType::COALESCED, titles_.all_gather, opts.timeout, inputs, outputs}, staging,
               [&] { return all_gather(planner_, me(), in, out, common_dtype(inputs)); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::ReduceScatterOptions& opts) {
  const char* name = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), "mccl: ", name, ": got ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs; give one output for each input, at least one");
  std::vector<WorkPtr> works;
  for (const auto& indices : by_dtype(outputs, name, compressor_.is_on())) {
    const Reduction reduction = reduction_of(outputs[indices[0]], opts.reduceOp, name);
    Staging staging;
    Tensors given, some;
    std::vector<std::vector<Buffer>> parts;
    for (const size_t i : indices) {
      check_same(inputs[i], outputs[i], name);
      given.push_back(inputs[i]);
      some.push_back(outputs[i]);
      parts.push_back(parts_to_reduce(staging, inputs[i], opts.reduceOp, reduction, name));
    }
    works.push_back(reduce_scatter_parts({c10d::OpType::COALESCED, titles_.reduce_scatter, opts.timeout, given, {}},
                                         staging, parts, some, reduction));
  }
  return one_of(rank_, std::move(works));
}

}  // namespace mccl
