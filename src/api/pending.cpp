// While the CPU backend is on its way: weak definitions so that programs link. Each throws; the real ones replace them.
#include "cpu/cpu.hpp"

namespace tandem::cpu {
namespace {
[[noreturn]] void pending() { throw Error(Status::unsupported, "this build has no CPU kernels yet"); }
}  // namespace

__attribute__((weak)) const char* name_of(Target) { pending(); }
__attribute__((weak)) bool available(Target) { pending(); }
__attribute__((weak)) Target best_target() { pending(); }
__attribute__((weak)) std::size_t workspace_bytes(const Problem&, const Config&) { pending(); }
__attribute__((weak)) Config choose(const Problem&, int) { pending(); }
__attribute__((weak)) void forward(const Problem&, const Config&, std::span<std::byte>) { pending(); }
__attribute__((weak)) void backward(const Problem&, const Config&, std::span<std::byte>) { pending(); }

}  // namespace tandem::cpu
