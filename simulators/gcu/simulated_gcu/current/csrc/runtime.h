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
// Let the monitors of this machine see what this process holds on a card (state.cpp); a file named by SIM_GCU_STATE.
void publish(int card, int64_t bytes);

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

// -- host views (views.cpp)

bool on_card(const at::Tensor& tensor);
c10::Storage host_storage(const c10::Storage& storage, bool owning);
at::Tensor rewrap(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key);
// A CPU tensor over the same bytes; keeps the card's storage alive when `owning`.
at::Tensor host_view(const at::Tensor& tensor, bool owning);
// The card computes in 32 bits: round what an operator wrote as 64-bit numbers. `host` is a CPU tensor.
void narrow_in_place(const at::Tensor& host);

// -- operators that the card lacks (kernels.cpp)

enum class Profile { s60, l600, both };
// Which card is simulated; `both` lacks what either of them lacks.
Profile profile();
// Whether the plug-in registers a kernel for an operator, given without its namespace, such as "add.out".
bool is_native(const std::string& name);
// Whether the plug-in sends it to the CPU all the same, for this card; `reduction` is that of scatter_reduce.
bool is_sent_to_cpu(const std::string& name, const std::string& reduction);
// Whether an operator that has reached the device goes to the CPU; throws under SIM_GCU_STRICT=1.
bool falls_back(const std::string& name, const std::string& reduction, bool complex);
// `bytes` go to the CPU and come back.
void count_fallback(const std::string& name, int64_t bytes);
struct Fallback {
  int64_t calls = 0, bytes = 0;
};
std::map<std::string, Fallback> fallbacks();
void reset_fallbacks();
// The vendor's statistics: how often each operator was used, where ENFLAME_PT_OP_DEBUG_CONFIG asks for them.
bool keeps_statistics();
void count_use(const std::string& name);
std::map<std::string, int64_t> uses_of_operators();
void reset_uses();

// -- what leaves and reaches the card, and where the process would wait for it (traffic.cpp)

struct Traffic {
  int64_t calls = 0, bytes = 0;
};
// A copy by the engine that every copy goes through; `host` is the side in the process's memory, null within the card.
void count_copy(const at::Tensor* host, const char* direction, int64_t bytes, bool non_blocking);
// The process waits for the card: `what` asks for it.
void count_wait(const std::string& what);
// Whether an operator gives what only the card's memory tells, a number or a shape, so that the process waits.
bool waits(const std::string& name);
std::map<std::string, Traffic> traffic();
void reset_traffic();

}  // namespace simgcu
