// For loops of the oracle, of the tests' emulator and of gradients in 8 bits: TANDEM_VECTOR_CLONES before a
// function has it compiled for AVX2, too, TANDEM_WIDE_CLONES for AVX-512 besides; which of them runs is
// chosen when the program starts. Such functions are static or in an unnamed namespace: GCC exports the
// resolvers of others.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TANDEM_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#define TANDEM_WIDE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TANDEM_VECTOR_CLONES
#define TANDEM_WIDE_CLONES
#endif
