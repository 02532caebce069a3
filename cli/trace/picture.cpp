#include "trace/picture.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>

namespace tandem::cli::trace {
namespace {

constexpr double labels = 120.0;  ///< width
constexpr double plot = 1060.0;
constexpr double right = 20.0;
constexpr double top = 66.0;
constexpr double row = 42.0;
constexpr double bar = 32.0;

struct Colours {
  const char* fill;
  const char* stroke;
};

constexpr Colours of_warpgroups[] = {{"#9fa8da", "#3949ab"}, {"#a5d6a7", "#2e7d32"}, {"#ffe082", "#ff8f00"}};

Colours colours_of(const Track& track, const Span& span) {
  switch (span.activity) {
    case Activity::softmax: return {"#ffcc99", "#e65100"};
    case Activity::epilogue: return {"#e1bee7", "#7b1fa2"};
    case Activity::wait: return {"#ffffff", "#b0bec5"};
    case Activity::copy: return {"#cfd8dc", "#607d8b"};
    case Activity::other: return {"#eceff1", "#90a4ae"};
    case Activity::issue:
    case Activity::product: break;
  }
  const int warpgroup = std::max(0, span.activity == Activity::product ? span.warpgroup : track.warpgroup);
  return of_warpgroups[static_cast<std::size_t>(warpgroup) % std::size(of_warpgroups)];
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

std::string text(double x, double y, double size, const char* anchor, std::string_view content) {
  return fmt::format(
      "  <text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" fill=\"#263238\" text-anchor=\"{}\">{}</text>\n", x,
      y, size, anchor, escaped(content));
}

class Picture {
 public:
  Picture(const Timeline& timeline, const Summary& summary, const PictureOptions& options)
      : timeline_(timeline),
        summary_(summary),
        options_(options),
        from_(options.from),
        to_(options.to == 0 ? std::max<std::uint64_t>(timeline.cycles, 1) : options.to) {}

  std::string draw() {
    const double height = top + row * static_cast<double>(timeline_.tracks.size()) + 64.0;
    const double width = labels + plot + right;
    svg_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
        "height=\"{1:.0f}\" font-family=\"sans-serif\" role=\"img\">\n  <title>{2}</title>\n"
        "  <rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#ffffff\"/>\n",
        width, height, escaped(options_.title));
    svg_ += text(10, 22, 15, "start", options_.title);
    svg_ += text(10, 42, 12, "start", options_.clock);
    double y = top;
    for (const Track& track : timeline_.tracks) {
      svg_ += text(labels - 10, y + bar / 2 + 4, 12, "end", track.name);
      for (const Span& span : track.spans) add(track, span, y);
      y += row;
    }
    add_axis(y);
    add_legend(y + 46.0);
    return svg_ + "</svg>\n";
  }

 private:
  [[nodiscard]] double x_of(std::uint64_t cycle) const {
    const std::uint64_t inside = std::clamp(cycle, from_, to_);
    return labels + plot * static_cast<double>(inside - from_) / static_cast<double>(to_ - from_);
  }

  void add(const Track& track, const Span& span, double y) {
    if (span.end <= from_ || span.begin >= to_) return;
    const Colours colours = colours_of(track, span);
    const double x = x_of(span.begin);
    const double width = std::max(x_of(span.end) - x, 0.3);
    const bool longest = track.name == summary_.longest_wait_of && span.activity == Activity::wait &&
                         span.begin == summary_.longest_wait.begin;
    const bool small = span.activity == Activity::wait || span.activity == Activity::other;
    const double inset = small ? 6.0 : 0.0;
    const std::string name = span.activity == Activity::wait ? "wait: " + span.name : span.name;
    svg_ += fmt::format(
        "  <rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"2\" fill=\"{}\" "
        "stroke=\"{}\" stroke-width=\"{}\"><title>{}{}{}: {} cycles at {}</title></rect>\n",
        x, y + inset, width, bar - 2 * inset, colours.fill, longest ? "#d50000" : colours.stroke,
        longest ? "2.5" : "0.7", escaped(name), span.detail.empty() ? "" : ", ", escaped(span.detail),
        span.cycles(), span.begin);
    constexpr double letter = 5.6;
    if (width > letter * static_cast<double>(span.name.size()) + 4)
      svg_ += text(x + width / 2, y + bar / 2 + 4, 10, "middle", span.name);
  }

  void add_axis(double y) {
    svg_ += fmt::format(
        "  <line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" y2=\"{1:.1f}\" stroke=\"#607d8b\"/>\n", labels,
        y, labels + plot);
    std::uint64_t step = 1;
    for (int i = 0; (to_ - from_) / step > 10; ++i) step = step * (i % 3 == 1 ? 5 : 4) / 2;
    for (std::uint64_t tick = (from_ + step - 1) / step * step; tick <= to_; tick += step) {
      const double x = x_of(tick);
      svg_ += fmt::format(
          "  <line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"#607d8b\"/>\n", x, y,
          y + 5);
      svg_ += text(x, y + 18, 11, "middle", fmt::format("{}", tick));
    }
    svg_ += text(labels - 10, y + 18, 11, "end", "cycles");
  }

  void add_legend(double y) {
    double x = labels;
    const auto entry = [&](const Colours& colours, std::string_view name) {
      svg_ += fmt::format(
          "  <rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"12\" rx=\"2\" fill=\"{}\" "
          "stroke=\"{}\"/>\n",
          x, y - 10, colours.fill, colours.stroke);
      svg_ += text(x + 19, y, 11, "start", name);
      x += 34.0 + 6.2 * static_cast<double>(name.size());
    };
    for (std::size_t w = 0; w < summary_.warpgroups.size(); ++w) {
      entry(of_warpgroups[w % std::size(of_warpgroups)], fmt::format("products of warpgroup {}", w));
    }
    entry({"#ffcc99", "#e65100"}, "softmax");
    entry({"#e1bee7", "#7b1fa2"}, "epilogue");
    entry({"#ffffff", "#b0bec5"}, "wait");
    entry({"#cfd8dc", "#607d8b"}, "copy in flight");
    if (!summary_.longest_wait_of.empty()) entry({"#ffffff", "#d50000"}, "longest wait");
  }

  const Timeline& timeline_;
  const Summary& summary_;
  const PictureOptions& options_;
  std::uint64_t from_;
  std::uint64_t to_;
  std::string svg_;
};

}  // namespace

std::string to_svg(const Timeline& timeline, const Summary& summary, const PictureOptions& options) {
  return Picture(timeline, summary, options).draw();
}

}  // namespace tandem::cli::trace
