// The simulated cards: how many there are, which one is current, and what lies in their memory.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include "graph.h"

namespace simgcu {

// torch 1.10 gives the card no device type of its own; the vendor uses the one that was made for XLA.
constexpr auto kCard = c10::DeviceType::XLA;
constexpr auto kCardKey = c10::DispatchKey::XLA;

// What the environment asks for; torch_gcu/_settings.py reads it and calls configure() once, before anything else.
struct Settings {
  int count = 8;
  int64_t memory = int64_t(32) << 30;  // bytes of each card
  int64_t graph_limit = 200000;        // operations that may wait in the graph of a process
  bool strict = false;                 // an operator that the card lacks is an error
  bool wide_integers = false;          // int64 keeps its 64 bits
};
const Settings& settings();
void configure(const Settings& chosen);

// -- cards

c10::DeviceIndex current_card();
// Throws on a number that no card has.
void select_card(int card);
// Without the check, for guards, which must not throw.
void select_card_unchecked(int card) noexcept;
void check_card(int card);
const at::Generator& generator(int card);
// Starts the generators of all cards anew.
void seed_all(uint64_t seed);

// -- memory

// What a storage on a card owns: its bytes, and what of the lazy graph is still to be computed for them.
struct Block {
  c10::DataPtr bytes;   // allocated for the card,
  c10::Storage result;  // or the result of a CPU kernel, taken over as it is
  int64_t size;
  c10::DeviceIndex card;
  Pending pending;
};

// Both throw where the card's memory does not suffice.
c10::DataPtr allocate(size_t size, c10::DeviceIndex card);
c10::DataPtr adopt(const c10::Storage& cpu, c10::DeviceIndex card);
c10::Allocator* card_allocator();
// The block of a storage on a card; null for any other storage.
Block* block_of(const c10::Storage& storage);

struct MemoryUse {
  int64_t current = 0, peak = 0;  // bytes
};
MemoryUse memory_use(int card);

// Run all that waits for live tensors of `card`.
void run_live(int card);

}  // namespace simgcu
