// fmt's functions, compiled once for all files that format (cmake/fmt.cmake). They are inline here, so that a
// program may have fmt's own library, too. Where the files are header-only themselves, none is needed.
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY

#include <fmt/format.h>

namespace {

/// Functions that other files call, and with them all that they call.
template <auto... functions>
struct Kept {
  [[gnu::used]] static inline const void* const addresses[] = {reinterpret_cast<const void*>(functions)...};
};
// format, print, and join with what its elements may be.
template struct Kept<static_cast<std::string (*)(fmt::string_view, fmt::format_args)>(fmt::vformat),
                     static_cast<void (*)(fmt::string_view, fmt::format_args)>(fmt::vprint),
                     static_cast<void (*)(std::FILE*, fmt::string_view, fmt::format_args)>(fmt::vprint),
                     static_cast<bool (*)(std::uint32_t)>(fmt::detail::is_printable),
                     fmt::detail::thousands_sep_impl<char>, fmt::detail::throw_format_error>;

}  // namespace
#endif
