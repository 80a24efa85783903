// CPU tensors over a card's memory and back, and what sets the card's arithmetic apart from the CPU's.
#pragma once
#include <ATen/ATen.h>

#include <map>
#include <string>

#include "cards.h"

namespace simgcu {

bool on_card(const at::Tensor& tensor);
// A CPU storage over the same bytes; keeps the card's alive when `owning`.
c10::Storage host_storage(const c10::Storage& storage, bool owning);
at::Tensor host_view(const at::Tensor& tensor, bool owning = false);
// The storage of a CPU result becomes the card's, without a copy.
c10::Storage card_storage(const c10::Storage& cpu, c10::DeviceIndex card);
at::Tensor to_card(const at::Tensor& cpu, c10::DeviceIndex card);
// Same shape and type as `tensor`, over another storage.
at::Tensor rewrap(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key);

// The card computes in 32 bits: round the 64-bit numbers that an operator wrote. `host` is a CPU tensor.
void narrow_in_place(const at::Tensor& host);

// Whether the card lacks an operator, for these types, and sends it to the CPU; counted, and an error in strict mode.
bool falls_back(const std::string& name, bool complex);
std::map<std::string, int64_t> fallbacks();
void reset_fallbacks();

// -- the lazy graph

// The value of `tensor` is read, and so must be there.
void run(const at::Tensor& tensor);
// `written` become results of one operation that needs `read` and, where it changes them only in part, themselves.
void record(const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read);
// The value of `tensor` has come from outside of the graph.
void arrived(const at::Tensor& tensor);

// Throws where two tensors of one operator do not lie together.
[[noreturn]] void refuse_mixture(c10::Device one, c10::Device other, const std::string& name);

}  // namespace simgcu
