// The vendor's collectives for tensors on a card, carried here by gloo.
#pragma once
#include <c10d/ProcessGroup.hpp>

namespace simgcu {

// A group over `gloo`, whose tensors must all lie on `card`.
c10::intrusive_ptr<c10d::ProcessGroup> make_eccl(int rank, int size, c10::intrusive_ptr<c10d::ProcessGroup> gloo,
                                                 int card);

}  // namespace simgcu
