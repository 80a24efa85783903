#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace simgcu {
// `gloo` does the work, over host views of the cards' memory; `store` is where ranks see that no two share a card.
c10::intrusive_ptr<c10d::Backend> make_eccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                            c10::intrusive_ptr<c10d::Backend> gloo);
}  // namespace simgcu
