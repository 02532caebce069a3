// From a Problem and its quantized values and scales to what the 8-bit forward kernel is launched with. Pure:
// needs no driver, so that the emulator's tests use it too.
#pragma once

#include "ops/forward/launch.hpp"
#include "ops/quantize/axes.hpp"

namespace tandem::gpu {

/// Scales as quantized_layout.hpp has them; those of v are null where V stays in 16 bits, shift where no mean
/// was removed.
struct QuantizedScales {
  const float* q = nullptr;
  const float* k = nullptr;
  const float* v = nullptr;
  const float* shift = nullptr;
};

/// The scales that the quantiser writes to the workspace of quantized_workspace.
QuantizedScales quantized_scales(const Recipe& recipe, const Workspace& workspace, char* memory);

/// Whether TMA can read quantized values of the caller's where they are.
bool can_read_quantized(const Problem& problem, const EightBitConfig& config);

/// A map of bytes in a region of the workspace, whose innermost dimension has rows of `pitch` bytes; `lines`
/// of them a head, of which `lines_read` are read. An empty tensor's map describes `nearby`.
LoadedMap quantized_map(Region region, const QuantizedAxes& axes, std::int64_t columns, std::int64_t pitch,
                        std::int64_t lines_read, std::int64_t lines, int strip, int box_lines,
                        const void* nearby);

/// The maps of quantized values: those that the quantiser writes to the workspace, the caller's where the
/// kernel reads them in place. Where V stays in 16 bits, of V as it is.
LoadedMaps eight_bit_maps(const Problem& problem, const EightBitConfig& config);

/// What a kernel in place writes: V, transposed, and its counters behind that of tiles.
void reserve_transposed(Workspace& workspace, const Problem& problem, const EightBitConfig& config);
TransposedValues transposed_values(const Problem& problem, const Workspace& workspace, char* memory);

/// What a kernel in place is launched with: the caller's quantized values and scales, which
/// can_read_quantized.
EightBitParams make_caller_params(const Problem& problem, const EightBitConfig& config,
                                  const LoadedMaps& maps, const TransposedValues& transposed,
                                  EncodeTensorMap encode, int sms, unsigned int* tile_counter);

/// `tile_counter`: 0 before the launch (dynamic Configs).
EightBitParams make_eight_bit_params(const Problem& problem, const EightBitConfig& config,
                                     const QuantizedScales& scales, const LoadedMaps& maps,
                                     EncodeTensorMap encode, int sms, unsigned int* tile_counter);

/// What a kernel that writes max_logits is launched with.
EightBitParamsWithMaxima with_maxima(const Problem& problem, const EightBitParams& params);

void fill_eight_bit_forward(StepParams& call, const Step& step);

namespace kernels {
inline constexpr KernelSpec eight_bit_forward{
    .header = "ops/eight_bit/sm90/eight_bit.cuh",
    .entry = "eight_bit_forward",
    .block =
        [](const KernelConfig& config) {
          const auto& c = std::get<EightBitConfig>(config);
          return BlockShape{.threads = c.threads(), .shared_bytes = eight_bit_shared_bytes(c)};
        },
    .params = fill_eight_bit_forward};
}

}  // namespace tandem::gpu
