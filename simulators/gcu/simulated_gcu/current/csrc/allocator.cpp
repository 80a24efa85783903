// Card memory is host memory that is counted; pinned memory is host memory that is remembered.
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>

#include "runtime.h"

namespace simgcu {
namespace {

struct Block {
  void* pointer;         // null where another storage owns the memory
  int64_t bytes;
  int device;
  c10::Storage adopted;  // that other storage
};

// Cards hand memory out in pages of this size.
int64_t rounded(size_t bytes) { return static_cast<int64_t>((bytes + 511) / 512 * 512); }

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  account(block->device, -block->bytes);
  if (block->pointer) c10::free_cpu(block->pointer);
  delete block;
}

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current_device()); }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return is_initialized(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats all;
    auto stats = memory_stats(device);
    for (auto* kind : {&all.allocated_bytes, &all.reserved_bytes, &all.active_bytes, &all.requested_bytes}) {
      (*kind)[0].current = stats.current;
      (*kind)[0].peak = stats.peak;
    }
    return all;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto stats = memory_stats(device);
    return {stats.total - stats.current, stats.total};
  }
};

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (pointer) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned[uintptr_t(pointer)] = bytes;
    }
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* pointer) {
    if (!pointer) return;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(uintptr_t(pointer));
    }
    c10::free_cpu(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

const bool registered = (c10::SetAllocator(kGCU, card_allocator()), true);

}  // namespace

c10::Allocator* card_allocator() {
  static auto* allocator = new CardAllocator;
  return allocator;
}

c10::DataPtr allocate_on(size_t bytes, int device) {
  lazy_init();
  c10::Device place(kGCU, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) return {nullptr, nullptr, [](void*) {}, place};
  account(device, rounded(bytes));
  void* pointer = nullptr;
  try {
    pointer = c10::alloc_cpu(bytes);
  } catch (...) {
    account(device, -rounded(bytes));
    throw;
  }
  return {pointer, new Block{pointer, rounded(bytes), device, {}}, &free_block, place};
}

c10::DataPtr adopt(const c10::Storage& cpu, int device) {
  lazy_init();
  auto bytes = rounded(cpu.nbytes());
  account(device, bytes);
  return {cpu.mutable_data(), new Block{nullptr, bytes, device, cpu}, &free_block,
          c10::Device(kGCU, static_cast<c10::DeviceIndex>(device))};
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(uintptr_t(pointer));
  if (next == pinned.begin()) return false;
  auto block = std::prev(next);
  return uintptr_t(pointer) < block->first + block->second;
}

}  // namespace simgcu
