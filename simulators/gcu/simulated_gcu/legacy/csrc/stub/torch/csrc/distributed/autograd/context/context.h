// The torch 1.10 wheel has c10d/reducer.hpp, but not this header that it includes. Only the names are needed here.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <memory>

namespace torch {
namespace distributed {
namespace autograd {

struct DistAutogradContext {
  using GradCallback = std::function<bool(at::Tensor&)>;
};
using ContextPtr = std::shared_ptr<DistAutogradContext>;

}  // namespace autograd
}  // namespace distributed
}  // namespace torch
