// One more version of a kernel for AVX2 where the loader can choose (not under the sanitizers, which start too late for
// ifuncs). arm64 has NEON always.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MCCL_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MCCL_CLONES
#endif
