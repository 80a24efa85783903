// The Python module torch_gcu._C; the public functions are in the package around it.
#include <torch/extension.h>

#include "eccl.h"
#include "views.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgcu;

  m.def("configure", [](int count, int64_t memory, int64_t graph_limit, bool strict, bool wide_integers) {
    Settings chosen;
    chosen.count = count;
    chosen.memory = memory;
    chosen.graph_limit = graph_limit;
    chosen.strict = strict;
    chosen.wide_integers = wide_integers;
    configure(chosen);
  });
  m.def("device_count", [] { return settings().count; });
  m.def("memory_total", [] { return settings().memory; });
  m.def("current_device", [] { return int(current_card()); });
  m.def("set_device", &select_card);
  m.def("seed_all", &seed_all);
  m.def("memory_use", [](int card) {
    auto use = memory_use(card);
    return std::make_pair(use.current, use.peak);
  });

  m.def("run_live", &run_live);
  m.def("run", [](const std::vector<at::Tensor>& tensors) {
    for (auto& tensor : tensors) run(tensor);
  });
  m.def("graph_counts", [] {
    auto counts = graph_counts();
    return std::make_tuple(counts.pending, counts.largest, counts.runs);
  });
  m.def("fallbacks", &fallbacks);
  m.def("reset_fallbacks", &reset_fallbacks);

  m.def("make_eccl", &make_eccl, py::call_guard<py::gil_scoped_release>());
}
