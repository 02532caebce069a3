// Which instruction sets this build contains and this processor runs, and which one a call takes.
#pragma once

#include <vector>

namespace tandem::cpu {

/// Instruction sets that the kernels are built for.
enum class Target : int {
  portable = 0,
  avx2 = 1,
  avx512 = 2,
  avx512_bf16 = 3,
  neon = 4,
  amx = 5,           ///< avx512_bf16 and Intel's matrix unit
  amx_emulated = 6,  ///< its kernels with plain code for the unit's instructions; in builds with tests
};

const char* name_of(Target target);
/// Whether this processor can run `target` and this build contains it.
bool available(Target target);
/// All that are, best last.
std::vector<Target> available_targets();
/// The fastest of them; TANDEM_CPU_TARGET (a name) overrides it and is an Error if not available.
Target best_target();
/// Why it is the fastest, where a better one might be expected; else empty.
const char* why_best_target();

}  // namespace tandem::cpu
