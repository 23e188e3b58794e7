#include "op/compressed.hpp"

#include <algorithm>
#include <utility>

#include "reduce/wire.hpp"

namespace mccl {

namespace {
constexpr uint64_t kWire_nbytes = 2;  // of an element

uint64_t wire_nbytes_of(uint64_t nbytes, DType dtype) { return nbytes / element_nbytes(dtype) * kWire_nbytes; }

// Takes away from `ranges` what is in `known`.
void subtract(std::vector<Range>& ranges, const std::vector<Range>& known) {
  for (auto have = known.rbegin(); have != known.rend() && !ranges.empty(); ++have) {  // the latest covers most
    std::vector<Range> kept;
    for (const Range& range : ranges) {
      const uint64_t begin = std::clamp(have->offset, range.offset, range.end());
      const uint64_t end = std::clamp(have->end(), range.offset, range.end());
      if (begin > range.offset) kept.push_back({range.offset, begin - range.offset});
      if (end < range.end()) kept.push_back({std::max(begin, end), range.end() - std::max(begin, end)});
    }
    ranges = std::move(kept);
  }
}

Range intersection(Range a, Range b) {
  const uint64_t begin = std::max(a.offset, b.offset), end = std::min(a.end(), b.end());
  return {begin, end > begin ? end - begin : 0};
}

// The ranges that are sent before anything has been received into them.
std::vector<Range> sent_unreceived(const std::vector<Step>& steps) {
  std::vector<Range> result, received;
  for (const Step& step : steps) {
    if (step.send_peer >= 0) {
      std::vector<Range> unreceived{step.send};
      subtract(unreceived, received);
      subtract(unreceived, result);
      result.insert(result.end(), unreceived.begin(), unreceived.end());
    }
    if (step.recv_peer >= 0) received.push_back(step.recv);
  }
  return result;
}

void fill_with_nan(const Buffer& buffer) {
  std::fill_n(buffer.data, buffer.nbytes, std::byte{0xFF});  // all ones are a NaN in fp32 and fp64
}

// A range of the wire form, cut where the caller's buffers are.
template <class Visit>
void for_each_part(const Buffers& memory, uint64_t element_nbytes, Range wire, Visit visit) {
  uint64_t done = 0;  // elements
  const uint64_t count = wire.nbytes / kWire_nbytes;
  while (done < count) {
    const uint64_t first = wire.offset / kWire_nbytes + done;
    const Buffer part = memory.front({first * element_nbytes, (count - done) * element_nbytes});
    const uint64_t n = part.nbytes / element_nbytes;
    visit(part.data, done, n);
    done += n;
  }
}

class CompressedCodec : public Codec {
 public:
  CompressedCodec(DType dtype, Compression wire, WireStatePtr state)
      : element_nbytes_(element_nbytes(dtype)), kernels_(wire_kernels(dtype, wire)), state_(std::move(state)) {}

 protected:
  void book(size_t clipped) {
    if (clipped > 0) state_->clipped_count += clipped;
  }

  const uint64_t element_nbytes_;
  const WireKernels kernels_;

 private:
  const WireStatePtr state_;
};

// `wire` holds a wire form for each element of the tensor; partial sums stay in the tensor.
class AllReduceCodec final : public CompressedCodec {
 public:
  // `symmetric`: partners compute the same sums (recursive doubling), so that each keeps what it sends.
  AllReduceCodec(std::vector<Buffer> data, std::byte* wire, std::vector<Range> first, bool symmetric, double scale,
                 DType dtype, Compression compression, WireStatePtr state)
      : CompressedCodec(dtype, compression, std::move(state)),
        tensor_(data),
        memory_(std::move(data), 0),
        wire_(wire),
        first_(std::move(first)),
        symmetric_(symmetric),
        scale_(scale) {}

  void begin() override {
    if (scale_ != 1) {
      for (const Buffer& buffer : tensor_) kernels_.multiply(buffer.data, buffer.nbytes / element_nbytes_, scale_);
    }
    if (!symmetric_) return;
    for (const Range& range : first_) {
      for_each_part(memory_, element_nbytes_, range, [&](std::byte* wide, uint64_t done, uint64_t count) {
        book(kernels_.narrow_through(wire_ + range.offset + done * kWire_nbytes, wide, count));
      });
    }
  }

  void before_send(Range range) override {
    if (symmetric_) return;
    for (const Range& first : first_) {
      const Range part = intersection(range, first);
      for_each_part(memory_, element_nbytes_, part, [&](std::byte* wide, uint64_t done, uint64_t count) {
        book(kernels_.narrow(wire_ + part.offset + done * kWire_nbytes, wide, count, 1));
      });
    }
  }

  void take(const Step& step, uint64_t done, const std::byte* data, uint64_t nbytes) override {
    const Range range{step.recv.offset + done, nbytes};
    std::byte* const wire = wire_ + range.offset;
    const bool reduce = step.action == Action::kReduce;
    MCCL_ASSERT(!reduce || step.operand == step.recv.offset);
    const bool keep = symmetric_ || step.finish;
    if (!reduce) std::copy_n(data, nbytes, wire);  // to be passed on
    for_each_part(memory_, element_nbytes_, range, [&](std::byte* wide, uint64_t at, uint64_t count) {
      const std::byte* in = data + at * kWire_nbytes;
      std::byte* out = wire + at * kWire_nbytes;
      if (!reduce) {
        kernels_.widen(wide, in, count);
      } else {
        book((keep ? kernels_.accumulate_through : kernels_.accumulate)(out, wide, in, count));
      }
    });
  }

  void invalidate_result() override {
    for (const Buffer& buffer : tensor_) fill_with_nan(buffer);
  }

 private:
  const std::vector<Buffer> tensor_;
  const Buffers memory_;
  std::byte* const wire_;
  const std::vector<Range> first_;
  const bool symmetric_;
  const double scale_;
};

// Of ring_reduce_scatter, whose address space is the input's blocks, the output, and partial sums on their way. Of the
// first only one block is sent, and of the second nothing.
class ReduceScatterCodec final : public CompressedCodec {
 public:
  // `first`: the input block that is sent as it is, and its wire form; `partial`: the memory of the partial sums.
  ReduceScatterCodec(const std::vector<Buffer>& inputs, Buffer output, Buffer first, std::byte* first_wire,
                     std::byte* partial, double scale, DType dtype, Compression compression, WireStatePtr state)
      : CompressedCodec(dtype, compression, std::move(state)),
        inputs_(inputs, 0),
        output_(output),
        first_(first),
        first_wire_(first_wire),
        partial_(partial),
        output_begin_(inputs_.nbytes() / element_nbytes_ * kWire_nbytes),
        scale_(scale) {}

  void begin() override {}

  void before_send(Range range) override {
    if (range.offset >= output_begin_) return;  // a partial sum
    const uint64_t at = range.offset % wire_block_nbytes();
    const std::byte* from = first_.data + at / kWire_nbytes * element_nbytes_;
    book(kernels_.narrow(first_wire_ + at, from, range.nbytes / kWire_nbytes, scale_));
  }

  void take(const Step& step, uint64_t done, const std::byte* data, uint64_t nbytes) override {
    const bool last = step.recv.offset == output_begin_;
    std::byte* const out = last ? output_.data + done / kWire_nbytes * element_nbytes_
                                : partial_ + (step.recv.offset - output_begin_ - wire_block_nbytes()) + done;
    for_each_part(inputs_, element_nbytes_, {step.operand + done, nbytes},
                  [&](std::byte* own, uint64_t at, uint64_t n) {
                    const std::byte* in = data + at * kWire_nbytes;
                    if (last) {
                      kernels_.deliver(out + at * element_nbytes_, own, in, n, scale_);
                    } else {
                      book(kernels_.forward(out + at * kWire_nbytes, own, in, n, scale_));
                    }
                  });
  }

  void invalidate_result() override { fill_with_nan(output_); }

 private:
  uint64_t wire_block_nbytes() const { return output_.nbytes / element_nbytes_ * kWire_nbytes; }

  const Buffers inputs_;
  const Buffer output_;
  const Buffer first_;
  std::byte* const first_wire_;
  std::byte* const partial_;
  const uint64_t output_begin_;
  const double scale_;
};

double scale_of(Elements elements, Member me) { return elements.op == ReduceOp::kAvg ? 1.0 / me.world : 1.0; }

OperationPtr make(OpKind kind, Elements elements, Compression wire, uint64_t nbytes, const Plan& plan,
                  Schedule schedule, std::vector<Buffer> buffers) {
  const Fingerprint fingerprint = fingerprint_of(kind, elements, nbytes, plan, wire);
  auto op = std::make_shared<Operation>(fingerprint, std::move(schedule), Buffers(std::move(buffers), 0));
  op->element_nbytes = kWire_nbytes;
  op->nbytes = nbytes;
  return op;
}
}  // namespace

bool is_compressible(Elements elements) {
  const bool wide = elements.dtype == DType::kFloat32 || elements.dtype == DType::kFloat64;
  return wide &&
         (elements.op == ReduceOp::kSum || elements.op == ReduceOp::kAvg || elements.op == ReduceOp::kPremulSum);
}

OperationPtr compressed_all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, Elements elements,
                                   Compression wire, const WireStatePtr& state) {
  if (me.world < 2) return all_reduce(planner, me, std::move(data), elements);
  const uint64_t nbytes = total_nbytes(data);
  const uint64_t wire_nbytes = wire_nbytes_of(nbytes, elements.dtype);
  const Plan plan = planner.plan(OpKind::kAllReduce, me.world, wire_nbytes);
  Schedule schedule = planner.all_reduce(plan, me, wire_nbytes, kWire_nbytes);
  MCCL_ASSERT(schedule.scratch_nbytes == 0);
  auto memory = state->pool->take(wire_nbytes);
  const bool symmetric = plan.algorithm == Algorithm::kRecursiveDoubling;
  auto codec = std::make_unique<AllReduceCodec>(std::move(data), memory.get(), sent_unreceived(schedule.steps),
                                                symmetric, scale_of(elements, me), elements.dtype, wire, state);
  auto op = make(OpKind::kAllReduce, elements, wire, nbytes, plan, std::move(schedule), {{memory.get(), wire_nbytes}});
  op->codec = std::move(codec);
  op->workspace = std::move(memory);
  return op;
}

OperationPtr compressed_reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs, Buffer output,
                                       Elements elements, Compression wire, const WireStatePtr& state) {
  if (me.world < 2) return reduce_scatter(planner, me, std::move(inputs), {output}, elements);
  check_blocks(me, inputs, {output}, "reduce_scatter");
  const uint64_t block_nbytes = wire_nbytes_of(output.nbytes, elements.dtype);
  const Plan plan{Algorithm::kRing, 1, 0};  // the circulant one would copy its input
  Schedule schedule = ring_reduce_scatter(me, block_nbytes);
  auto memory = state->pool->take(block_nbytes + schedule.scratch_nbytes);
  std::byte* const partial = memory.get() + block_nbytes;
  // No step touches the blocks whose place in the address space the first block's memory takes.
  std::vector<Buffer> buffers(inputs.size() + 1, {memory.get(), block_nbytes});
  buffers.push_back({partial, schedule.scratch_nbytes});
  const Buffer first = inputs[static_cast<size_t>((me.rank + me.world - 1) % me.world)];
  auto codec = std::make_unique<ReduceScatterCodec>(inputs, output, first, memory.get(), partial,
                                                    scale_of(elements, me), elements.dtype, wire, state);
  auto op = make(OpKind::kReduceScatter, elements, wire, output.nbytes, plan, std::move(schedule), std::move(buffers));
  op->codec = std::move(codec);
  op->workspace = std::move(memory);
  return op;
}

}  // namespace mccl
