// The contract on the kernels that every GPU from Ampere on runs.
#include "emulated_gpu.hpp"

int main(int argc, char** argv) {
  using namespace tandem::kernel_tests;
  std::vector<std::span<const EmulatedForward>> grouped = {grouped_sm80_forwards()};
  std::vector<std::span<const EmulatedForward>> sharing = {split_sm80_forwards()};
  for (const auto& few :
       {function_sm80_forwards_of_few(), dropout_sm80_forwards_of_few(), gated_sm80_forwards()}) {
    for (const EmulatedForward& kernel : few)
      (kernel.config.tiling.heads_as_rows ? grouped : sharing).push_back({&kernel, 1});
  }
  return run_contract(
      argc, argv,
      {.name = "emulated sm80",
       .whole = {general_sm80_forwards(), function_sm80_forwards(), dropout_sm80_forwards(),
                 gated_sm80_forwards()},
       .sharing = sharing,
       .grouped = grouped,
       .decoding = {},
       .wide = {},
       .listed = {function_sm80_forwards_of_lists()},
       // There is no kernel for keys of 8 bits yet, nor for heads of more than 256 dimensions.
       .without = ":*_RowScales.*:*.ScalesByRow*:*.EightBitQueries*:Contract17_Caches.EightBits*:Contract18_"
                  "Caches.EightBit*:"
                  "Contract16_BatchInvariance.KeysOfEightBits:*_WideHeads.*:*.OfWideHeads:Contract07_NaN.*"
                  "LowLogits*:"
                  "Contract08_NoSentinel.EqualKeysWithGiantLogitsAreTheirMean:"
                  // As on the kernels for Hopper; and what takes long and is of the functions' text, or is
                  // in kernels_functions_tests.
                  "Contract19_Functions.Published*:Contract19_Functions.WithSoftcapWhichComesFirst:"
                  "Contract19_Functions.WithEveryKindOfScale:Contract19_Functions.WithHeadsOfEveryRatio:"
                  "Contract19_Functions.FewQueries:"
                  "Contract19_Functions.LongerThanARunOfKeys:"
                  "Contract19_Functions.BitsOfASequenceWithSplitSize:"
                  "Contract19_Functions.ThreadsChangeNoBit:"
                  "Contract19_FunctionGradients.ThreadsChangeNoBit:"
                  "Contract19_Functions.LogitsWithoutASentinel:"
                  "Contract19_Dropout.LongerThanARunOfKeys:"
                  "Contract19_Dropout.ThreadsChangeNoBit:Contract19_Dropout.KeepsItsShare",
       .backward = {general_sm80_backwards(), f32_sm80_backwards(), function_sm80_backwards_of_lists(),
                    function_sm80_backwards(), dropout_sm80_backwards(), captured_sm80_backwards()}});
}
