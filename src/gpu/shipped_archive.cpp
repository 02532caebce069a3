// The shipped set of a build with NVRTC: the archive that tools/ship_kernels wrote, linked in as it is.
#include "gpu/shipped.hpp"

asm(".section .rodata, \"a\"\n"
    ".balign 16\n"
    ".hidden tandem_shipped_begin\n"
    ".hidden tandem_shipped_end\n"
    ".global tandem_shipped_begin\n"
    ".global tandem_shipped_end\n"
    "tandem_shipped_begin:\n"
    ".incbin \"" TANDEM_SHIPPED_ARCHIVE
    "\"\n"
    "tandem_shipped_end:\n"
    ".previous\n");

extern "C" {
__attribute__((visibility("hidden"))) extern const char tandem_shipped_begin[];
__attribute__((visibility("hidden"))) extern const char tandem_shipped_end[];
}

namespace tandem::gpu {

__attribute__((weak)) std::span<const char> shipped_archive() {
  return {tandem_shipped_begin, static_cast<std::size_t>(tandem_shipped_end - tandem_shipped_begin)};
}

}  // namespace tandem::gpu
