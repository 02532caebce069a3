// For loops of the oracle and of the tests' emulator: TANDEM_VECTOR_CLONES before a function has it compiled
// for AVX2, too; which of the two runs is chosen when the program starts.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TANDEM_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define TANDEM_VECTOR_CLONES
#endif
