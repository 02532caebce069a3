// The switches of mutants that are compiled together (scripts/mutant_switches.py): TANDEM_MUTANT(n) holds
// where mutant n is on. scripts/mutate.py includes this file before all others; no other build has it.
#pragma once

namespace tandem::mutation {

constexpr int most_mutants = 4096;
extern int active;                           ///< from the environment's TANDEM_MUTANT; 0: none
extern unsigned char reached[most_mutants];  ///< that this test has come to, on or off

/// Off where the compiler decides: a kernel's types and sizes are those without a mutant.
[[gnu::always_inline]] constexpr bool on(int mutant) {
  if (__builtin_is_constant_evaluated()) return false;
  reached[mutant] = 1;
  return mutant == active;
}

}  // namespace tandem::mutation

#define TANDEM_MUTANT(n) ::tandem::mutation::on(n)
