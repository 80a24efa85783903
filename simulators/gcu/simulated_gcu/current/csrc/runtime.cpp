// The cards: how many there are, which are visible, which one is current, and how full each is.
#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

namespace simgcu {
namespace {

thread_local c10::DeviceIndex current = 0;
std::atomic<bool> initialized{false}, bad_fork{false};
std::mutex memory_mutex;
std::array<MemoryStats, kMaxCards> memory;

std::string variable(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

int total_count() {
  auto text = variable("SIM_GCU_COUNT");
  int count = text.empty() ? 8 : atoi(text.c_str());
  TORCH_CHECK(count >= 0 && count <= kMaxCards, "SIM_GCU_COUNT=", text, " must lie between 0 and ", kMaxCards);
  return count;
}

// As the drivers read such a list: it ends at the first entry that is no card.
const std::vector<int>& visible_cards() {
  static const auto* cards = [] {
    auto* found = new std::vector<int>;
    int total = total_count();
    const char* list = getenv("TOPS_VISIBLE_DEVICES");
    if (!list) {
      for (int i = 0; i < total; ++i) found->push_back(i);
      return found;
    }
    std::stringstream items(list);
    for (std::string item; std::getline(items, item, ',');) {
      item.erase(0, item.find_first_not_of(' '));
      item.erase(item.find_last_not_of(' ') + 1);
      if (item.empty() || item.find_first_not_of("0123456789") != std::string::npos || atoi(item.c_str()) >= total) break;
      found->push_back(atoi(item.c_str()));
    }
    return found;
  }();
  return *cards;
}

int64_t card_memory() {
  static const int64_t bytes = [] {
    auto text = variable("SIM_GCU_MEMORY");
    if (text.empty()) return int64_t(42) << 30;
    char* unit = nullptr;
    double number = strtod(text.c_str(), &unit);
    std::string suffix(unit);
    static const std::map<std::string, double> units{{"", 1}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
    TORCH_CHECK(number > 0 && units.count(suffix), "SIM_GCU_MEMORY=", text, " is no size; write 512MiB, 42GiB or bytes");
    return int64_t(number * units.at(suffix));
  }();
  return bytes;
}

}  // namespace

int device_count() { return visible_cards().size(); }

int physical_index(int device) {
  check_ordinal(device);
  return visible_cards()[device];
}

c10::DeviceIndex current_device() { return current; }

void check_ordinal(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "GCU error: invalid device ordinal ", device, " (there are ",
              device_count(), " cards)");
}

void set_device(int device) {
  lazy_init();
  check_ordinal(device);
  current = static_cast<c10::DeviceIndex>(device);
}

void set_device_unchecked(int device) noexcept {
  if (device >= 0 && device < device_count()) current = static_cast<c10::DeviceIndex>(device);
}

bool is_initialized() { return initialized && !bad_fork; }
bool is_bad_fork() { return bad_fork; }

void lazy_init() {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize GCU in forked subprocess. To use GCU with multiprocessing, you must use ",
              "the 'spawn' start method");
  if (initialized) return;
  TORCH_CHECK(device_count() > 0, "No GCU devices are available");
  if (!initialized.exchange(true)) pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
}

MemoryStats memory_stats(int device) {
  check_ordinal(device);
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto stats = memory[device];
  stats.total = card_memory();
  return stats;
}

void reset_peak(int device) {
  check_ordinal(device);
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory[device].peak = memory[device].current;
}

void account(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto& stats = memory[device];
  auto mib = [](int64_t n) { return double(n) / (1 << 20); };
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= 0 || stats.current + bytes <= card_memory(),
                   "GCU out of memory. Tried to allocate ", mib(bytes), " MiB. GCU ", device, " has a total capacity of ",
                   mib(card_memory()), " MiB of which ", mib(card_memory() - stats.current), " MiB is free.");
  stats.current += bytes;
  publish(visible_cards()[device], stats.current);
  if (bytes > 0) {
    stats.allocations++;
    stats.peak = std::max(stats.peak, stats.current);
  }
}

}  // namespace simgcu
