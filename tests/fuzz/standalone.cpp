// A small driver for compilers without libFuzzer: runs the corpus, then random mutations of it, without coverage.
//   PROGRAM [-max_total_time=SECONDS] [-seed=N] CORPUS...
// The options are libFuzzer's. The input that is running is kept in ./crash-input, and removed at the end.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes);

namespace {

using Bytes = std::vector<uint8_t>;
constexpr const char* kCurrent = "crash-input";
constexpr size_t kMost_nbytes = 4096;

std::vector<Bytes> read_corpus(const std::filesystem::path& folder) {
  std::vector<Bytes> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

void run(const Bytes& input) {
  std::ofstream(kCurrent, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

Bytes mutate(Bytes input, const std::vector<Bytes>& corpus, std::mt19937& random) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  for (size_t changes = 1 + below(8); changes > 0; --changes) {
    const auto at = static_cast<std::ptrdiff_t>(below(input.size()));
    switch (random() % 5) {
      case 0:
        if (!input.empty()) input[static_cast<size_t>(at)] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        if (!input.empty()) input[static_cast<size_t>(at)] = static_cast<uint8_t>(random());
        break;
      case 2: input.insert(input.begin() + at, static_cast<uint8_t>(random())); break;
      case 3:
        if (!input.empty()) input.erase(input.begin() + at);
        break;
      case 4: {
        const Bytes& other = corpus[below(corpus.size())];
        const auto from = static_cast<std::ptrdiff_t>(below(other.size()));
        input.insert(input.begin() + at, other.begin() + from, other.end());
      }
    }
  }
  if (input.size() > kMost_nbytes) input.resize(kMost_nbytes);
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Bytes> corpus{{}};
  int seconds = 0;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("-max_total_time=")) {
      seconds = std::atoi(argument.c_str() + 16);
    } else if (argument.starts_with("-seed=")) {
      seed = static_cast<unsigned>(std::atoi(argument.c_str() + 6));
    } else if (!argument.starts_with("-")) {
      for (Bytes& input : read_corpus(argument)) corpus.push_back(std::move(input));
    }
  }
  for (const Bytes& input : corpus) run(input);
  std::mt19937 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  size_t runs = corpus.size();
  for (; std::chrono::steady_clock::now() < end; ++runs) run(mutate(corpus[random() % corpus.size()], corpus, random));
  std::filesystem::remove(kCurrent);
  std::fprintf(stderr, "Done %zu runs in %d second(s)\n", runs, seconds);
  return 0;
}
