// The lazy graph, as far as it can be seen from outside.
//
// A real card of this generation computes nothing when an operator is called. It records the operator, and runs what a
// tensor needs when that tensor's value is read, or when a step ends. This simulation computes at once, because values
// are the same either way, but keeps the books: which operators would still be waiting, and what would run them.
//
// An operator waits as long as a live tensor needs it: one whose results are gone is never run, as on the card.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace simgcu {

class Operation;
using OperationPtr = std::shared_ptr<Operation>;

// What the value of one block of memory waits for.
class Pending {
 public:
  // The operation still to run, or null.
  OperationPtr operation() const;
  // The value becomes the result of `operation`; null: it is there.
  void set(OperationPtr operation);
  // Run what the value needs: this operation, and through it whatever it needs in turn.
  void run();

 private:
  OperationPtr operation_;
};

// Add an operation that needs `inputs`; throws when the graph has grown beyond its limit.
OperationPtr record(const std::vector<const Pending*>& inputs);

struct GraphCounts {
  int64_t pending = 0;  // operations that wait
  int64_t largest = 0;  // the most that ever waited
  int64_t runs = 0;     // how often something that waited was run
};
GraphCounts graph_counts();

}  // namespace simgcu
