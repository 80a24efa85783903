// Cards and their memory, which is the host's: the simulation counts it against each card's size.
#include "cards.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace simgcu {
namespace {

constexpr int kMaxCards = 64;
constexpr double kMiB = 1 << 20;

Settings chosen_settings;
thread_local c10::DeviceIndex current = 0;

struct CardMemory {
  MemoryUse use;
  std::unordered_set<Block*> blocks;
};

std::mutex memory_mutex;

// Never destroyed: tensors may outlive every static object.
std::array<CardMemory, kMaxCards>& memories() {
  static auto* all = new std::array<CardMemory, kMaxCards>;
  return *all;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto& memory = memories()[block->card];
    memory.use.current -= block->size;
    memory.blocks.erase(block);
  }
  delete block;
}

c10::DataPtr place(void* data, std::unique_ptr<Block> block) {
  auto card = block->card;
  check_card(card);
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto& memory = memories()[card];
    auto total = settings().memory;
    TORCH_CHECK(memory.use.current + block->size <= total, "GCU out of memory: tried to allocate ",
                block->size / kMiB, " MiB on xla:", int(card), ", which has ", total / kMiB, " MiB, of which ",
                memory.use.current / kMiB, " MiB are allocated; use smaller batches or another model");
    memory.use.current += block->size;
    memory.use.peak = std::max(memory.use.peak, memory.use.current);
    memory.blocks.insert(block.get());
  }
  return {data, block.release(), &free_block, c10::Device(kCard, card)};
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) const override { return simgcu::allocate(size, current); }
};

std::vector<at::Generator>& generators() {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int card = 0; card < settings().count; ++card) made->push_back(at::detail::createCPUGenerator());
    return made;
  }();
  return *all;
}

}  // namespace

const Settings& settings() { return chosen_settings; }

void configure(const Settings& chosen) {
  TORCH_CHECK(chosen.count >= 0 && chosen.count <= kMaxCards, "simulated gcu: SIM_GCU_COUNT must be from 0 to ",
              kMaxCards, ", got ", chosen.count);
  chosen_settings = chosen;
}

c10::DeviceIndex current_card() { return current; }

void check_card(int card) {
  TORCH_CHECK(card >= 0 && card < settings().count, "GCU: there is no card xla:", card, "; this process sees ",
              settings().count, " (TOPS_VISIBLE_DEVICES)");
}

void select_card(int card) {
  check_card(card);
  current = c10::DeviceIndex(card);
}

void select_card_unchecked(int card) noexcept { current = c10::DeviceIndex(card); }

const at::Generator& generator(int card) {
  check_card(card);
  return generators()[card];
}

void seed_all(uint64_t seed) {
  for (auto& one : generators()) {
    std::lock_guard<std::mutex> lock(one.mutex());
    one.set_current_seed(seed);
  }
}

c10::DataPtr allocate(size_t size, c10::DeviceIndex card) {
  auto bytes = c10::GetCPUAllocator()->allocate(size);
  void* data = bytes.get();
  return place(data, std::unique_ptr<Block>(new Block{std::move(bytes), {}, int64_t(size), card, {}}));
}

c10::DataPtr adopt(const c10::Storage& cpu, c10::DeviceIndex card) {
  return place(cpu.data(), std::unique_ptr<Block>(new Block{{}, cpu, int64_t(cpu.nbytes()), card, {}}));
}

c10::Allocator* card_allocator() {
  static auto* allocator = new CardAllocator;
  return allocator;
}

Block* block_of(const c10::Storage& storage) { return storage.data_ptr().cast_context<Block>(&free_block); }

MemoryUse memory_use(int card) {
  check_card(card);
  std::lock_guard<std::mutex> lock(memory_mutex);
  return memories()[card].use;
}

void run_live(int card) {
  check_card(card);
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (auto* block : memories()[card].blocks) block->pending.run();
}

namespace {
const bool registered = (c10::SetAllocator(kCard, card_allocator()), true);
}

}  // namespace simgcu
