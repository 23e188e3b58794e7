// Wire kernels against plain arithmetic, the choice of the largest elements against a sort, and the pool of wire forms.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "op/wire_pool.hpp"
#include "reduce/half.hpp"
#include "reduce/top_k.hpp"
#include "reduce/wire.hpp"

using namespace mccl;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  Compression wire;
  float (*load)(uint16_t);
  float most;
  uint16_t infinity;
};
const Format kFormats[] = {{Compression::kFloat16, half_to_float, 65504.0f, 0x7C00},
                           {Compression::kBFloat16, bfloat16_to_float, 0x1.FEp127f, 0x7F80}};

template <class T>
constexpr DType dtype_of() {
  return sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
}

// The finite wire value nearest to x; of two equally near the one with an even last bit. By looking at its neighbours.
uint16_t nearest(const Format& format, double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  uint16_t low = 0, high = static_cast<uint16_t>(format.infinity - 1);
  const double magnitude = std::fabs(x);
  if (magnitude >= format.load(high)) return static_cast<uint16_t>(sign | high);
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (format.load(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - format.load(low), above = format.load(high) - magnitude;
  const bool up = above < below || (above == below && low % 2 == 1);
  return static_cast<uint16_t>(sign | (up ? high : low));
}

template <class T>
std::vector<T> samples() {
  std::vector<T> values{0,      T(-0.0),  1,       T(65504),  T(65519.99), T(65520),
                        T(1e6), T(-1e30), T(6e-8), T(2.9e-8), T(-1e-40)};
  values.push_back(static_cast<T>(std::numeric_limits<float>::max()));
  std::mt19937 random(1);
  std::uniform_real_distribution<double> exponent(-140, 127), mantissa(-2, 2);
  for (int i = 0; i < 20'000; ++i) values.push_back(static_cast<T>(mantissa(random) * std::exp2(exponent(random))));
  for (int i = 0; i < 20'000; ++i) values.push_back(static_cast<T>(mantissa(random) * 40'000));
  return values;
}
}  // namespace

TEST_CASE_TEMPLATE("narrowing rounds to nearest even and clips what is finite", T, float, double) {
  const std::vector<T> values = samples<T>();
  for (const Format& format : kFormats) {
    const WireKernels kernels = wire_kernels(dtype_of<T>(), format.wire);
    std::vector<uint16_t> wire(values.size());
    const size_t clipped = kernels.narrow(wire.data(), values.data(), values.size(), 1);
    size_t beyond = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      beyond += std::fabs(values[i]) > static_cast<T>(format.most);
      // fp64 goes by way of fp32.
      CHECK_MESSAGE(wire[i] == nearest(format, static_cast<float>(values[i])), to_string(format.wire), " of ",
                    values[i]);
    }
    CHECK(clipped == beyond);
    CHECK(beyond > 0);
  }
}

TEST_CASE_TEMPLATE("infinities stay, and every NaN becomes the same", T, float, double) {
  const T nan = std::numeric_limits<T>::quiet_NaN(), infinity = std::numeric_limits<T>::infinity();
  const std::vector<T> values{infinity, -infinity, nan, -nan};
  for (const Format& format : kFormats) {
    const WireKernels kernels = wire_kernels(dtype_of<T>(), format.wire);
    std::vector<uint16_t> wire(values.size());
    CHECK(kernels.narrow(wire.data(), values.data(), values.size(), 1) == 0);
    CHECK(wire[0] == format.infinity);
    CHECK(wire[1] == (format.infinity | 0x8000));
    CHECK(std::isnan(format.load(wire[2])));
    CHECK(wire[2] == wire[3]);
  }
}

TEST_CASE_TEMPLATE("sums are those of the memory's type, rounded once", T, float, double) {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> draw(-100, 100);
  constexpr size_t kCount = 1001;
  for (const Format& format : kFormats) {
    const WireKernels kernels = wire_kernels(dtype_of<T>(), format.wire);
    std::vector<T> own(kCount);
    std::vector<uint16_t> in(kCount), wire(kCount), rounded(kCount);
    for (size_t i = 0; i < kCount; ++i) own[i] = static_cast<T>(draw(random)), in[i] = nearest(format, draw(random));
    std::vector<T> sum(kCount), scaled(kCount), back(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      sum[i] = own[i] + static_cast<T>(format.load(in[i]));
      scaled[i] = own[i] * T(0.25) + static_cast<T>(format.load(in[i]));
    }
    std::vector<T> memory = own;
    kernels.accumulate(wire.data(), memory.data(), in.data(), kCount);
    CHECK(memory == sum);
    kernels.narrow(rounded.data(), sum.data(), kCount, 1);
    CHECK(wire == rounded);
    kernels.widen(back.data(), rounded.data(), kCount);
    memory = own;
    kernels.accumulate_through(wire.data(), memory.data(), in.data(), kCount);
    CHECK(wire == rounded);
    CHECK(memory == back);
    memory = sum;
    kernels.narrow_through(wire.data(), memory.data(), kCount);
    CHECK(memory == back);
    kernels.deliver(memory.data(), own.data(), in.data(), kCount, 0.25);
    CHECK(memory == scaled);
    kernels.narrow(rounded.data(), scaled.data(), kCount, 1);
    kernels.forward(wire.data(), own.data(), in.data(), kCount, 0.25);
    CHECK(wire == rounded);
    memory = own;
    kernels.deliver(memory.data(), memory.data(), in.data(), kCount, 0.25);  // in place
    CHECK(memory == scaled);
  }
}

TEST_CASE("other formats are refused") {
  CHECK_THROWS_WITH(wire_kernels(DType::kInt32, Compression::kFloat16),
                    doctest::Contains("int32 cannot travel as fp16"));
  CHECK_THROWS_WITH(wire_kernels(DType::kFloat32, Compression::kTopK), doctest::Contains("topk"));
}

TEST_CASE_TEMPLATE("the largest are those of a sort", T, float, double) {
  std::mt19937 random(3);
  for (const size_t count : {1u, 2u, 10u, 1000u, 70'001u}) {
    for (const int kind : {0, 1, 2}) {  // distinct, many equal, of all magnitudes and not finite
      std::vector<T> values(count);
      std::uniform_real_distribution<double> draw(-1, 1), exponent(-140, 127);
      for (T& value : values) {
        value = static_cast<T>(kind == 1 ? std::round(draw(random) * 5) : draw(random));
        if (kind == 2) value *= static_cast<T>(std::exp2(exponent(random)));
        if (kind == 2 && random() % 50 == 0)
          value = random() % 2 == 0 ? static_cast<T>(NAN) : static_cast<T>(-kInfinity);
      }
      std::vector<uint32_t> order(count);
      std::iota(order.begin(), order.end(), 0u);
      const auto key = [&](uint32_t i) { return std::bit_cast<uint32_t>(static_cast<float>(values[i])) & 0x7FFFFFFFu; };
      std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key(a) > key(b); });
      for (const size_t k : {size_t{1}, (count + 99) / 100, (count + 1) / 2, count}) {
        std::vector<uint32_t> expected(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k)), chosen(k);
        std::sort(expected.begin(), expected.end());
        select_largest(std::span<const T>(values), chosen);
        CHECK(chosen == expected);
      }
    }
  }
}

TEST_CASE("the pool gives blocks again, and holds no more than were in use at once") {
  auto pool = std::make_shared<WirePool>();
  auto a = pool->take(1000);
  const auto* first = a.get();
  a.reset();
  CHECK(pool->kept_nbytes() == 1000);
  CHECK(pool->take(900).get() == first);
  auto b = pool->take(2000);  // the one of 1000 makes way
  CHECK(pool->kept_nbytes() == 0);
  b.reset();
  for (size_t nbytes = 1; nbytes < 5000; nbytes += 100) pool->take(nbytes);
  CHECK(pool->kept_nbytes() < 5000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < 2000; ++i) std::memset(pool->take(100 + i % 7).get(), 1, 100);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool->kept_nbytes() < 5 * 5000);
  auto last = pool->take(10);
  std::weak_ptr<WirePool> alive = pool;
  pool.reset();
  CHECK(!alive.expired());  // a block in use keeps its pool
  last.reset();
  CHECK(alive.expired());
}
