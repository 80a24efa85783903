// What the Python package sees.
#include <torch/csrc/utils/pybind.h>

#include "eccl.h"
#include "runtime.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgcu;
  m.def("device_count", &device_count);
  m.def("physical_index", &physical_index);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", &set_device);
  m.def("exchange_device", [](int device) {
    int before = current_device();
    if (device >= 0) set_device(device);
    return before;
  });
  m.def("is_initialized", &is_initialized);
  m.def("is_bad_fork", &is_bad_fork);
  m.def("lazy_init", &lazy_init);
  m.def("memory_stats", [](int device) {
    auto stats = memory_stats(device);
    return std::make_tuple(stats.current, stats.peak, stats.allocations, stats.total);
  });
  m.def("reset_peak", &reset_peak);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("fallbacks", [] {
    std::map<std::string, std::pair<int64_t, int64_t>> found;
    for (auto& [name, count] : fallbacks()) found[name] = {count.calls, count.bytes};
    return found;
  });
  m.def("reset_fallbacks", &reset_fallbacks);
  m.def("traffic", [] {
    std::map<std::string, std::pair<int64_t, int64_t>> found;
    for (auto& [name, count] : traffic()) found[name] = {count.calls, count.bytes};
    return found;
  });
  m.def("reset_traffic", &reset_traffic);
  m.def("count_wait", &count_wait);
  m.def("profile", [] { return profile() == Profile::s60 ? "s60" : profile() == Profile::l600 ? "l600" : ""; });
  m.def("uses_of_operators", &uses_of_operators);
  m.def("reset_uses", &reset_uses);
  m.def("make_eccl", &make_eccl);
}
