// The contract on the kernels for Hopper.
#include "emulated_gpu.hpp"

int main(int argc, char** argv) {
  using namespace tandem::kernel_tests;
  std::vector<std::span<const EmulatedForward>> grouped = {
      heads_as_rows_forwards(), mixed_heads_as_rows_forwards(), row_scales_heads_as_rows_forwards()};
  std::vector<std::span<const EmulatedForward>> sharing = {split_forwards(), mixed_split_forwards(),
                                                           row_scales_split_forwards()};
  // Each by itself, since some have heads as rows. They come first: other kernels refuse functions.
  for (const auto& few : {function_forwards_of_few(), dropout_forwards_of_few()}) {
    for (const EmulatedForward& kernel : few) {
      auto& kernels = kernel.config.tiling.heads_as_rows ? grouped : sharing;
      kernels.insert(kernels.begin(), {&kernel, 1});
    }
  }
  for (const EmulatedForward& kernel : gated_forwards())
    (kernel.config.tiling.heads_as_rows ? grouped : sharing).push_back({&kernel, 1});
  sharing.push_back(gated_function_forwards());
  return run_contract(
      argc, argv,
      {.name = "emulated gpu",
       .whole = {general_forwards(), mixed_forwards(), row_scales_forwards(), function_forwards(),
                 dropout_forwards(), gated_forwards(), gated_function_forwards()},
       .sharing = sharing,
       .grouped = grouped,
       .decoding = {decode_forwards(), decode_bytes_forwards()},
       .wide = {widest_heads_forwards()},
       .listed = {function_forwards_of_lists(), gated_function_forwards()},
       .maxima = {maxima_forwards()},
       .without = ":Contract21_MaxLogits.OfOneKeyIsTheLse:Contract21_MaxLogits.ChangesNoBitOfTheOthers:"
                  "Contract19_Functions.PublishedMasks:Contract19_Functions.PublishedScores:"
                  "Contract19_Functions.LongerThanARunOfKeys:"
                  "Contract19_Functions.BitsOfASequenceWithSplitSize:"
                  "Contract19_Functions.ThreadsChangeNoBit:"
                  "Contract19_FunctionGradients.ThreadsChangeNoBit:"
                  "Contract19_Functions.LogitsWithoutASentinel:"
                  "Contract19_Dropout.LongerThanARunOfKeys:"
                  "Contract19_Dropout.ThreadsChangeNoBit:Contract19_Dropout.KeepsItsShare",
       .backward = {general_backwards(), f32_backwards(), function_backwards_of_lists(), function_backwards(),
                    dropout_backwards(), captured_backwards(), captured_sm80_backwards()},
       .eight_bit_backward = {general_eight_bit_backwards(), narrow_eight_bit_backwards()}});
}
