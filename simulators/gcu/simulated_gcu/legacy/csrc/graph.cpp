#include "graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>

#include "cards.h"

namespace simgcu {
namespace {

// Guards every operation and every Pending: backward passes record from threads of their own.
std::mutex graph_mutex;
GraphCounts counts;

// Operations are chained over whole epochs: freeing them one inside the other would exhaust the stack.
void release(std::vector<OperationPtr> dropped) {
  thread_local std::vector<OperationPtr>* waiting = nullptr;
  if (waiting) {
    std::move(dropped.begin(), dropped.end(), std::back_inserter(*waiting));
    return;
  }
  waiting = &dropped;
  while (!dropped.empty()) {
    auto last = std::move(dropped.back());
    dropped.pop_back();
    last.reset();  // may come back here, and append to `dropped`
  }
  waiting = nullptr;
}

}  // namespace

class Operation {
 public:
  explicit Operation(std::vector<OperationPtr> inputs) : inputs_(std::move(inputs)) {}
  Operation(const Operation&) = delete;

  ~Operation() {
    if (!done_) forget();
    release(std::move(inputs_));
  }

  bool done() const { return done_; }

  // The value is there, so what led to it is no longer needed; gives the inputs, to be released outside the lock.
  std::vector<OperationPtr> finish() {
    done_ = true;
    --counts.pending;
    return std::move(inputs_);
  }

 private:
  static void forget() {
    std::lock_guard<std::mutex> lock(graph_mutex);
    --counts.pending;
  }

  std::vector<OperationPtr> inputs_;
  bool done_ = false;
};

OperationPtr Pending::operation() const {
  std::lock_guard<std::mutex> lock(graph_mutex);
  return operation_ && !operation_->done() ? operation_ : nullptr;
}

void Pending::set(OperationPtr operation) {
  std::lock_guard<std::mutex> lock(graph_mutex);
  operation_.swap(operation);
}  // the old one is freed after the lock, which its destructor takes

void Pending::run() {
  OperationPtr finished;
  std::vector<OperationPtr> inputs;
  {
    std::lock_guard<std::mutex> lock(graph_mutex);
    finished.swap(operation_);
    if (!finished || finished->done()) return;
    inputs = finished->finish();
    ++counts.runs;
  }
  release(std::move(inputs));
}

OperationPtr record(const std::vector<const Pending*>& inputs) {
  std::vector<OperationPtr> needed;
  for (auto* input : inputs) {
    auto operation = input->operation();
    if (operation) needed.push_back(std::move(operation));
  }
  auto made = std::make_shared<Operation>(std::move(needed));
  int64_t pending = 0;
  {
    std::lock_guard<std::mutex> lock(graph_mutex);
    pending = ++counts.pending;
    counts.largest = std::max(counts.largest, pending);
  }
  TORCH_CHECK(pending <= settings().graph_limit, "GCU: the lazy graph of this process has grown to ", pending,
              " operations, for which a card has no memory left (SIM_GCU_GRAPH_LIMIT); end every step with ",
              "torch_gcu.optimizer_step(optimizer), or with torch_gcu.sync_lived_tensor() where there is no optimizer");
  return made;
}

GraphCounts graph_counts() {
  std::lock_guard<std::mutex> lock(graph_mutex);
  return counts;
}

}  // namespace simgcu
