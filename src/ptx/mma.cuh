// Matrix multiply-accumulate of one warp (mma.sync): D (16 x 8) += A (16 x 16) * B (16 x 8), all in
// registers.
//
// Lane l holds of D the elements d[2 * h + e] of row l / 4 + 8 * h, column 2 * (l % 4) + e: four of these
// side by side are as a warp's rows of a WGMMA accumulator (ptx/wgmma.cuh). Of A, a[2 * g + h] packs columns
// 8 * g + 2 * (l % 4) + {0, 1} of row l / 4 + 8 * h, as there. Of B, b[g] packs rows 8 * g + 2 * (l % 4) +
// {0, 1} of column l / 4.
#pragma once

#include "config/types.hpp"
#include "ptx/base.cuh"

namespace tandem::ptx {

template <Element element>
TANDEM_DEVICE void mma(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
#if TANDEM_ON_DEVICE
  if constexpr (element == Element::bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  emulator::mma(element, d, a, b0, b1);
#endif
}

}  // namespace tandem::ptx
