// What every part of the simulated card shares: the cards, their memory, their generators, and host views of it all.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <map>
#include <string>

namespace simgcu {

constexpr auto kGCU = c10::DeviceType::PrivateUse1;
constexpr int kMaxCards = 64;

// -- cards (runtime.cpp)

int device_count();
// Index of a visible card among all cards of the machine: what tells two processes that they share one.
int physical_index(int device);
c10::DeviceIndex current_device();
void set_device(int device);  // throws on a bad ordinal
// Without the check: for guards, which must not throw.
void set_device_unchecked(int device) noexcept;
void check_ordinal(int device);
bool is_initialized();
bool is_bad_fork();
void lazy_init();  // throws in a forked child of an initialised parent

// -- memory (runtime.cpp, allocator.cpp)

struct MemoryStats {
  int64_t current = 0, peak = 0, allocations = 0, total = 0;  // bytes, bytes, count, bytes
};
MemoryStats memory_stats(int device);
void reset_peak(int device);
// Count `bytes` (negative: freed) on a card; throws OutOfMemoryError beyond its memory.
void account(int device, int64_t bytes);

c10::Allocator* card_allocator();
c10::DataPtr allocate_on(size_t bytes, int device);
// The memory of a CPU result becomes the card's, without a copy.
c10::DataPtr adopt(const c10::Storage& cpu, int device);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// -- generators (generator.cpp)

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// The CPU generator that does the work of a card's.
at::Generator& inner_generator(const at::Generator& generator);

// -- host views and operators that the card lacks (views.cpp, unsupported.cpp)

bool on_card(const at::Tensor& tensor);
c10::Storage host_storage(const c10::Storage& storage, bool owning);
at::Tensor rewrap(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key);
// A CPU tensor over the same bytes; keeps the card's storage alive when `owning`.
at::Tensor host_view(const at::Tensor& tensor, bool owning);
// The card computes in 32 bits: round what an operator wrote as 64-bit numbers. `host` is a CPU tensor.
void narrow_in_place(const at::Tensor& host);

// Throws, or counts and logs, where the card has no kernel for the operator and would send it to the CPU.
void check_supported(const std::string& name, bool complex);
std::map<std::string, int64_t> fallbacks();
void reset_fallbacks();

}  // namespace simgcu
