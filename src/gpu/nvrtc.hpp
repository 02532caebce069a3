// The functions of NVRTC that Tandem calls, found in a library opened at run time.
#pragma once

#include <cstddef>
#include <string>

namespace tandem::gpu {

struct Nvrtc {
  using Program = struct ProgramOpaque*;
  using Result = int;

  const char* (*get_error_string)(Result);
  Result (*version)(int*, int*);
  Result (*create_program)(Program*, const char* source, const char* name, int headers,
                           const char* const* texts, const char* const* names);
  Result (*destroy_program)(Program*);
  Result (*add_name_expression)(Program, const char*);
  Result (*compile_program)(Program, int options, const char* const*);
  Result (*get_lowered_name)(Program, const char* expression, const char**);
  Result (*get_log_size)(Program, std::size_t*);
  Result (*get_log)(Program, char*);
  Result (*get_cubin_size)(Program, std::size_t*);
  Result (*get_cubin)(Program, char*);
  Result (*get_ptx_size)(Program, std::size_t*);
  Result (*get_ptx)(Program, char*);
  Result (*count_architectures)(int*);
  Result (*list_architectures)(int*);
};

/// A table of functions, and the file it came from; or the reason why there is none.
struct OpenedNvrtc {
  Nvrtc functions{};
  std::string path;
  std::string objection;
};

/// Tries the places that compiler() names, in that order. Never throws.
OpenedNvrtc open_nvrtc();

}  // namespace tandem::gpu
