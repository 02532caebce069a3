// A timeline as a drawing.
#pragma once

#include <cstdint>
#include <string>

#include "trace/timeline.hpp"

namespace tandem::cli::trace {

struct PictureOptions {
  std::string title = {};
  std::string clock = {};  ///< what a cycle is
  std::uint64_t from = 0;
  std::uint64_t to = 0;  ///< 0: to the end
};

/// An SVG document: a row a track, cycles [from, to) from left to right, the longest wait with a red frame.
std::string to_svg(const Timeline& timeline, const Summary& summary, const PictureOptions& options);

}  // namespace tandem::cli::trace
