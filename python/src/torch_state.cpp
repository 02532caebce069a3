#include "torch_state.hpp"

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace tandem::python {
namespace {

/// Never destroyed: Python may be gone by then.
struct States {
  std::vector<std::pair<PyObject*, PyObject*>> idle;
  PyObject* forward_ad = nullptr;
  PyObject* level = PyUnicode_InternFromString("_current_level");
  PyObject* profiled = nullptr;
  PyObject* recording = nullptr;
  PyObject* deterministic = nullptr;
};

// What know_states made last. Earlier ones are kept: a thread may be reading one.
std::atomic<const States*> known = nullptr;

PyObject* kept(nb::handle object) {
  return nb::object(nb::borrow(object)).release().ptr();
}

bool is_true(PyObject* function) {
  return nb::handle(function)().ptr() == Py_True;
}

}  // namespace

void know_states(const nb::tuple& idle, nb::handle forward_ad, nb::handle profiled, nb::handle recording,
                 nb::handle deterministic) {
  auto made = std::make_unique<States>();
  for (const nb::handle pair : idle) made->idle.emplace_back(kept(pair[0]), kept(pair[1]));
  made->forward_ad = kept(forward_ad);
  made->profiled = kept(profiled);
  made->recording = kept(recording);
  made->deterministic = kept(deterministic);
  known = made.release();
}

bool is_followed() {
  const States& states = *known;
  for (const auto& [function, value] : states.idle) {
    if (nb::handle(function)().ptr() != value) return true;
  }
  return nb::cast<int>(nb::getattr(states.forward_ad, nb::handle(states.level))) >= 0;
}

bool is_profiled() {
  return is_true(known.load()->profiled);
}

bool is_recording() {
  return is_true(known.load()->recording);
}

bool is_deterministic() {
  return is_true(known.load()->deterministic);
}

}  // namespace tandem::python
