#include "cpu/targets/target.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/targets/kernels.hpp"
#include "problem/stats.hpp"
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
namespace amx {
extern const Kernels all_kernels;
}
#if defined(TANDEM_WITH_EMULATED_AMX)
namespace amx_emulated {
extern const Kernels all_kernels;
}
#endif
#elif defined(__aarch64__)
namespace neon {
extern const Kernels all_kernels;
}
#endif

namespace {

/// The best last.
constexpr Target all_targets[] = {Target::amx_emulated, Target::portable, Target::avx2, Target::avx512,
                                  Target::avx512_bf16,  Target::amx,      Target::neon};

#if defined(__x86_64__)
/// What the compiler's __builtin_cpu_supports does not know: f16c in Clang 14, the matrix unit in GCC 12.
/// Asked once: in a virtual machine each CPUID is a way to the hypervisor and back, 20 us of every call.
struct Processor {
  bool f16c = false;  ///< its registers are AVX's, which avx2 answers for
  bool intel = false;
  bool matrix_unit = false;  ///< for bf16 and 8 bits
  bool may_use_it = false;   ///< the system lets this process
};

/// Linux hands the unit's 8 KB a thread to those who ask.
bool ask_for_matrix_unit() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

const Processor& processor() {
  static const Processor known = [] {
    Processor p;
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    p.f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    p.intel = __get_cpuid(0, &a, &b, &c, &d) != 0 && b == signature_INTEL_ebx;
    constexpr unsigned tile_bits = 1U << 22U | 1U << 24U | 1U << 25U;  // bf16, tiles, int8
    p.matrix_unit = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & tile_bits) == tile_bits;
    p.may_use_it = p.matrix_unit && ask_for_matrix_unit();
    return p;
  }();
  return known;
}
#endif

/// Whether the bf16 dot product is slower than products in f32: 114 GFLOP/s a core of a Xeon, whose f32 has
/// 230. On AMD's processors it is twice as fast.
bool has_slow_dot() {
#if defined(__x86_64__)
  return processor().intel;
#else
  return false;
#endif
}

}  // namespace

const char* name_of(Target target) {
  switch (target) {
    case Target::portable: return "portable";
    case Target::avx2: return "avx2";
    case Target::avx512: return "avx512";
    case Target::avx512_bf16: return "avx512_bf16";
    case Target::neon: return "neon";
    case Target::amx: return "amx";
    case Target::amx_emulated: return "amx_emulated";
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
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && processor().f16c &&
             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    case Target::avx512:
      return available(Target::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Target::avx512_bf16: return available(Target::avx512) && __builtin_cpu_supports("avx512bf16");
    case Target::amx:
      return available(Target::avx512_bf16) && __builtin_cpu_supports("avx512vbmi") && processor().may_use_it;
#if defined(TANDEM_WITH_EMULATED_AMX)
    case Target::amx_emulated: return available(Target::avx512_bf16) && __builtin_cpu_supports("avx512vbmi");
#endif
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
    fail(Status::unsupported,
         "TANDEM_CPU_TARGET is '{}', which this build or this processor does not have; unset it or choose "
         "from {}",
         wish, names);
  }
  Target best = Target::portable;
  for (Target target : all_targets) {
    if (available(target) && !(target == Target::avx512_bf16 && has_slow_dot())) best = target;
  }
  return best;
}

const char* why_best_target() {
#if defined(__x86_64__)
  if (processor().matrix_unit && !processor().may_use_it) {
    return "the system does not let this process use the processor's matrix unit (arch_prctl)";
  }
  if (available(Target::avx512_bf16) && has_slow_dot() && !available(Target::amx)) {
    return "Intel's bf16 dot product has half the speed of f32's";
  }
#endif
  return "";
}

const Kernels& kernels(Target target) {
  switch (target) {
#if defined(__x86_64__)
    case Target::avx2: return avx2::all_kernels;
    case Target::avx512: return avx512::all_kernels;
    case Target::avx512_bf16: return avx512_bf16::all_kernels;
    case Target::amx: return amx::all_kernels;
#if defined(TANDEM_WITH_EMULATED_AMX)
    case Target::amx_emulated: return amx_emulated::all_kernels;
#endif
#elif defined(__aarch64__)
    case Target::neon: return neon::all_kernels;
#endif
    default: return portable::all_kernels;
  }
}

}  // namespace tandem::cpu
