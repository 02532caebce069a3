// While the CPU backward is on its way: weak definitions so that programs link. The real ones replace them.
#include "cpu/workspace.hpp"

namespace tandem::cpu {
namespace {
[[noreturn]] void pending() { throw Error(Status::unsupported, "this build has no CPU backward yet"); }
}  // namespace

__attribute__((weak)) std::size_t backward_workspace_bytes(const Problem&, const Config&) { pending(); }
__attribute__((weak)) void backward(const Problem&, const Config&, std::span<std::byte>) { pending(); }

}  // namespace tandem::cpu
