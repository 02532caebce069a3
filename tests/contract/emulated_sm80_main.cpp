// The contract on the kernels that every GPU from Ampere on runs.
#include "emulated_gpu.hpp"

int main(int argc, char** argv) {
  using namespace tandem::kernel_tests;
  return run_contract(
      argc, argv,
      {.name = "emulated sm80",
       .whole = {general_sm80_forwards()},
       .sharing = {split_sm80_forwards()},
       .grouped = {grouped_sm80_forwards()},
       .decoding = {},
       .wide = {},
       // There is no kernel for keys of 8 bits yet, nor for heads of more than 256 dimensions.
       .without = ":Contract17_Caches.EightBits*:Contract18_Caches.EightBit*:"
                  "Contract16_BatchInvariance.KeysOfEightBits:*_WideHeads.*:*.OfWideHeads",
       .backward = {general_sm80_backwards()}});
}
