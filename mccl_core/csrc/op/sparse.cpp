#include "op/sparse.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "reduce/top_k.hpp"

namespace mccl {

namespace {

// A rank's block on the wire: k indices, ascending, and then their k values.
struct Entries {
  uint32_t* indices;
  float* values;
};

constexpr uint64_t kEntry_nbytes = sizeof(uint32_t) + sizeof(float);

// The caller's elements, which need no alignment.
template <class T>
T get(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}
template <class T>
void put(std::byte* data, T value) {
  std::memcpy(data, &value, sizeof value);
}

class SparseCodec final : public Codec {
 public:
  SparseCodec(Member me, std::vector<Buffer> data, ResidualPtr residual, uint64_t kept_count, Elements elements,
              std::shared_ptr<std::byte[]> blocks)
      : me_(me),
        data_(std::move(data)),
        residual_(std::move(residual)),
        kept_count_(kept_count),
        elements_(elements),
        blocks_(std::move(blocks)) {}

  void begin() override {
    if (elements_.dtype == DType::kFloat64) {
      select<double>();
    } else {
      select<float>();
    }
  }

  void before_send(Range) override {}

  void take(const Step& step, uint64_t done, const std::byte* data, uint64_t nbytes) override {
    std::copy_n(data, nbytes, blocks_.get() + step.recv.offset + done);
  }

  void invalidate_result() override {
    for (const Buffer& buffer : data_) std::fill_n(buffer.data, buffer.nbytes, std::byte{0xFF});
  }

  bool finishes() const override { return true; }
  void finish() override {
    if (elements_.dtype == DType::kFloat64) {
      sum_as<double>();
    } else {
      sum_as<float>();
    }
    blocks_.reset();
  }

 private:
  Entries block(int32_t rank) const {
    auto* indices =
        reinterpret_cast<uint32_t*>(blocks_.get() + static_cast<uint64_t>(rank) * kept_count_ * kEntry_nbytes);
    return {indices, reinterpret_cast<float*>(indices + kept_count_)};
  }

  template <class T>
  void select() {
    const auto sums = std::span(reinterpret_cast<T*>(residual_->data()), residual_->nbytes() / sizeof(T));
    const T scale = elements_.op == ReduceOp::kAvg ? T(1) / static_cast<T>(me_.world) : T(1);
    size_t at = 0;
    for (const Buffer& buffer : data_) {
      for (uint64_t i = 0; i < buffer.nbytes; i += sizeof(T)) sums[at++] += get<T>(buffer.data + i) * scale;
    }
    const Entries own = block(me_.rank);
    select_largest(std::span<const T>(sums), std::span(own.indices, kept_count_));
    bool finite = true;
    for (uint64_t j = 0; j < kept_count_; ++j) {
      T& sum = sums[own.indices[j]];
      own.values[j] = static_cast<float>(sum);
      finite = finite && std::isfinite(own.values[j]);
      sum -= static_cast<T>(own.values[j]);  // zero, but for what fp32 does not hold of fp64
    }
    // Infinities and NaN are sent first. They, and those for which there was no room, must not come back for ever.
    if (finite) return;
    for (T& left : sums) left = std::isfinite(left) ? left : T(0);
  }

  template <class T>
  void sum_as() const {
    std::vector<std::byte*> starts;
    std::vector<uint64_t> begins;
    uint64_t count = 0;
    for (const Buffer& buffer : data_) {
      std::memset(buffer.data, 0, buffer.nbytes);
      if (buffer.nbytes == 0) continue;
      starts.push_back(buffer.data);
      begins.push_back(count);
      count += buffer.nbytes / sizeof(T);
    }
    for (int32_t rank = 0; rank < me_.world; ++rank) {
      const Entries entries = block(rank);
      size_t buffer = 0;
      for (uint64_t j = 0; j < kept_count_; ++j) {
        const uint64_t index = entries.indices[j];
        if (index >= count || (j > 0 && index <= entries.indices[j - 1])) {
          throw_usage("rank " + std::to_string(rank) + " sent an index that is not in this tensor");
        }
        while (buffer + 1 < begins.size() && begins[buffer + 1] <= index) ++buffer;
        std::byte* const element = starts[buffer] + (index - begins[buffer]) * sizeof(T);
        put(element, get<T>(element) + static_cast<T>(entries.values[j]));
      }
    }
  }

  const Member me_;
  const std::vector<Buffer> data_;
  const ResidualPtr residual_;
  const uint64_t kept_count_;
  const Elements elements_;
  std::shared_ptr<std::byte[]> blocks_;
};

}  // namespace

OperationPtr sparse_all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, ResidualPtr residual,
                               uint64_t kept_count, Elements elements, const WireStatePtr& state) {
  const uint64_t nbytes = total_nbytes(data);
  MCCL_ASSERT(residual->nbytes() == nbytes);
  const uint64_t block_nbytes = kept_count * kEntry_nbytes;
  const uint64_t blocks_nbytes = block_nbytes * static_cast<uint64_t>(me.world);
  const Plan plan = planner.plan(OpKind::kAllGather, me.world, block_nbytes);
  Schedule schedule = plan.algorithm == Algorithm::kCirculant ? circulant_all_gather(me, block_nbytes)
                                                              : ring_all_gather(me, block_nbytes);
  auto blocks = state->pool->take(blocks_nbytes);
  Fingerprint fingerprint = fingerprint_of(OpKind::kAllReduce, elements, nbytes, plan, Compression::kTopK);
  fingerprint.channel_count = 1;  // whatever an all-gather could use
  auto op = std::make_shared<Operation>(fingerprint, std::move(schedule), Buffers({{blocks.get(), blocks_nbytes}}, 0));
  op->nbytes = nbytes;
  auto codec = std::make_unique<SparseCodec>(me, std::move(data), std::move(residual), kept_count, elements, blocks);
  op->codec = std::move(codec);
  op->workspace = std::move(blocks);
  return op;
}

}  // namespace mccl
