// Counts what a program sends to a card and back, and each time that a real card would make it wait.
#include <mutex>
#include <unordered_set>

#include "runtime.h"

namespace simgcu {
namespace {

std::mutex mutex;
std::map<std::string, Traffic> counts;

void add(const std::string& name, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& count = counts[name];
  count.calls++;
  count.bytes += bytes;
}

}  // namespace

void count_copy(const at::Tensor* host, const char* direction, int64_t bytes, bool non_blocking) {
  add(direction, bytes);
  if (host && bytes && !(non_blocking && is_pinned(host->const_data_ptr()))) count_wait(direction);
}

void count_wait(const std::string& what) { add("wait " + what, 0); }

bool waits(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique", "_unique2",
      "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount"};
  auto base = name.substr(0, name.find('.'));
  auto colons = base.rfind("::");
  return names.count(colons == std::string::npos ? base : base.substr(colons + 2)) > 0;
}

std::map<std::string, Traffic> traffic() {
  std::lock_guard<std::mutex> lock(mutex);
  return counts;
}

void reset_traffic() {
  std::lock_guard<std::mutex> lock(mutex);
  counts.clear();
}

}  // namespace simgcu
