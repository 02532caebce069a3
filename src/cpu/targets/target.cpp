#include "cpu/targets/target.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "cpu/targets/kernels.hpp"
#include "tandem/error.hpp"

namespace tandem::cpu {

namespace portable {
extern const Kernels all_kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels all_kernels;
}
namespace avx512 {
extern const Kernels all_kernels;
}
namespace avx512_bf16 {
extern const Kernels all_kernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels all_kernels;
}
#endif

namespace {

constexpr Target all_targets[] = {Target::portable, Target::avx2, Target::avx512, Target::avx512_bf16,
                                  Target::neon};

#if defined(__x86_64__)
/// Clang 14's __builtin_cpu_supports does not know f16c. Its registers are AVX's, which avx2 answers for.
/// Asked once: in a virtual machine each CPUID is a way to the hypervisor and back, 20 us of every call.
bool has_f16c() {
  static const bool has = [] {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  }();
  return has;
}
#endif

}  // namespace

const char* name_of(Target target) {
  switch (target) {
    case Target::portable: return "portable";
    case Target::avx2: return "avx2";
    case Target::avx512: return "avx512";
    case Target::avx512_bf16: return "avx512_bf16";
    case Target::neon: return "neon";
  }
  return "unknown";
}

bool available(Target target) {
  switch (target) {
    case Target::portable: return true;
#if defined(__x86_64__)
    // The flags that targets.cmake compiles each of them with. The compiler's support code also checks that
    // the operating system saves the wide registers.
    case Target::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    case Target::avx512:
      return available(Target::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Target::avx512_bf16: return available(Target::avx512) && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    case Target::neon: return true;
#endif
    default: return false;
  }
}

std::vector<Target> available_targets() {
  std::vector<Target> targets;
  std::copy_if(std::begin(all_targets), std::end(all_targets), std::back_inserter(targets), available);
  return targets;
}

Target best_target() {
  if (const char* wish = std::getenv("TANDEM_CPU_TARGET"); wish != nullptr && *wish != '\0') {
    for (Target target : all_targets) {
      if (std::string(wish) == name_of(target) && available(target)) return target;
    }
    std::string names;
    for (Target target : available_targets()) {
      names += std::string(names.empty() ? "" : ", ") + name_of(target);
    }
    throw Error(Status::unsupported,
                "TANDEM_CPU_TARGET is '" + std::string(wish) +
                    "', which this build or this processor does not have; unset it or choose from " + names);
  }
  Target best = Target::portable;
  for (Target target : all_targets) {
    if (available(target)) best = target;
  }
  return best;
}

const Kernels& kernels(Target target) {
  switch (target) {
#if defined(__x86_64__)
    case Target::avx2: return avx2::all_kernels;
    case Target::avx512: return avx512::all_kernels;
    case Target::avx512_bf16: return avx512_bf16::all_kernels;
#elif defined(__aarch64__)
    case Target::neon: return neon::all_kernels;
#endif
    default: return portable::all_kernels;
  }
}

}  // namespace tandem::cpu
