// What the calls that gpu_speed times read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/device.hpp"
#include "tandem/attention.hpp"

namespace tandem::bench {

/// Device memory of normal numbers, or their quantized values of scale 1 (e4m3) or 1 / 32 (s8): four million
/// drawn, then repeated, at no place in a row or head where they were before.
gpu::DeviceBuffer random_tensor(std::size_t elements, DType dtype, unsigned seed);

/// "131072,1000x16": one of 131072 and a thousand of 16.
std::vector<std::int64_t> parse_lengths(const std::string& text);

/// How rows and heads of a page follow each other. `interleaved`: rows before heads, and V of a page follows
/// its K; else all pages of V follow those of K.
enum class PageLayout : int { rows_first, heads_first, interleaved };

/// Pages of K and V, and the page table: a row of page numbers for each sequence.
struct KeyPages {
  gpu::DeviceBuffer rows, table;
};

/// Copies k and v of `args`, which are (batch, rows, heads, dim) and fill the buffers `k` and `v`, into pages
/// in a random order. The call is of these then.
KeyPages put_into_pages(ForwardArgs& args, const gpu::DeviceBuffer& k, const gpu::DeviceBuffer& v,
                        std::int64_t page_size, PageLayout layout);

}  // namespace tandem::bench
