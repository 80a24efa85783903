// torch.autocast("gcu"): torch's own lists of what runs in half precision and what stays in float32.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {
using namespace at;
using namespace at::autocast;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIMGCU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMGCU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMGCU_FP32_OPTION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMGCU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMGCU_LOWER_PRECISION)
  AT_FORALL_FP32(SIMGCU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMGCU_FP32_OPTION)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMGCU_PROMOTE)
}
}  // namespace
