#include "trace/chrome.hpp"

#include <nlohmann/json.hpp>
#include <vector>

namespace tandem::cli::trace {
namespace {

using Json = nlohmann::ordered_json;

Json event(const char* phase, std::size_t track, std::uint64_t cycle) {
  return {{"ph", phase}, {"pid", 1}, {"tid", track + 1}, {"ts", static_cast<double>(cycle) / 1000.0}};
}

Json metadata(const char* name, std::size_t track, const std::string& value) {
  return {{"ph", "M"}, {"pid", 1}, {"tid", track}, {"name", name}, {"args", {{"name", value}}}};
}

/// Begins and ends in order of time. Inner spans end before outer ones.
void add_spans(Json& events, const Track& track, std::size_t index) {
  std::vector<const Span*> open;
  const auto end_until = [&](std::uint64_t cycle) {
    while (!open.empty() && open.back()->end <= cycle) {
      events.push_back(event("E", index, open.back()->end));
      open.pop_back();
    }
  };
  for (const Span& span : track.spans) {
    end_until(span.begin);
    Json begin = event("B", index, span.begin);
    begin["name"] = span.activity == Activity::wait ? "wait: " + span.name : span.name;
    begin["cat"] = name_of(span.activity);
    begin["args"] = {{"cycles", span.cycles()}};
    if (!span.detail.empty()) begin["args"]["detail"] = span.detail;
    events.push_back(begin);
    open.push_back(&span);
  }
  end_until(UINT64_MAX);
}

}  // namespace

std::string to_chrome_trace(const Timeline& timeline, const std::string& title) {
  Json events = Json::array();
  events.push_back(metadata("process_name", 0, title));
  for (std::size_t i = 0; i < timeline.tracks.size(); ++i) {
    events.push_back(metadata("thread_name", i + 1, timeline.tracks[i].name));
    Json order = metadata("thread_sort_index", i + 1, "");
    order["args"] = {{"sort_index", i}};
    events.push_back(order);
  }
  for (std::size_t i = 0; i < timeline.tracks.size(); ++i) add_spans(events, timeline.tracks[i], i);
  const Json document{{"displayTimeUnit", "ns"},
                      {"otherData", {{"unit", "1 ns stands for 1 cycle"}}},
                      {"traceEvents", events}};
  return document.dump(1) + "\n";
}

}  // namespace tandem::cli::trace
