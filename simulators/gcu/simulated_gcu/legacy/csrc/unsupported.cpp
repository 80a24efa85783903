// What the card has no kernel for, and sends back to the CPU one operator at a time.
//
// The vendor publishes no list by operator; this one follows what its documentation says of whole kinds: no complex
// numbers, no FFT, no sparse and no quantised tensors. The matrix decompositions are here because their kernels would
// be LAPACK's, and the sets because the shape of their result depends on the data.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

#include "views.h"

namespace simgcu {
namespace {

const std::unordered_set<std::string>& without_kernel() {
  static const std::unordered_set<std::string> names{
      // FFT
      "aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c",
      // complex numbers
      "aten::complex", "aten::polar", "aten::angle", "aten::view_as_complex", "aten::_conj_physical",
      // simulated quantisation
      "aten::fake_quantize_per_tensor_affine_cachemask", "aten::fake_quantize_per_channel_affine_cachemask",
      // matrix decompositions and solvers
      "aten::_svd_helper", "aten::linalg_eigh", "aten::linalg_eig", "aten::_symeig_helper", "aten::linalg_qr",
      "aten::_linalg_qr_helper", "aten::cholesky", "aten::linalg_cholesky_ex", "aten::linalg_inv_ex",
      "aten::_inverse_helper", "aten::_linalg_inv_out_helper_", "aten::_lu_with_info", "aten::_lu_solve_helper",
      "aten::linalg_solve", "aten::_solve_helper", "aten::linalg_lstsq", "aten::triangular_solve", "aten::geqrf",
      "aten::ormqr", "aten::matrix_exp", "aten::_det_lu_based_helper",
      // data-dependent shapes of sets
      "aten::unique_dim", "aten::unique_consecutive", "aten::_unique", "aten::_unique2", "aten::histc"};
  return names;
}

// Operators whose result no card can hold, so that not even the CPU can help.
bool is_unrepresentable(const std::string& name) {
  return name.find("sparse") != std::string::npos || name.find("::quantize_per") != std::string::npos;
}

// The vendor's switches for its log of fallbacks.
bool logs_each() {
  static const bool on = [] {
    const char* level = std::getenv("ENFLAME_LOG_DEBUG_LEVEL");
    const char* module = std::getenv("ENFLAME_LOG_DEBUG_MOD");
    return level && module && std::string(level) == "DEBUG" &&
           std::string(module).find("TORCH_GCU/FALLBACK") != std::string::npos;
  }();
  return on;
}

std::mutex mutex;
std::map<std::string, int64_t> counts;

}  // namespace

bool falls_back(const std::string& name, bool complex) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_unrepresentable(name), "GCU has no sparse and no quantised tensors, and so no ", name,
                              "; make them on the CPU");
  if (!complex && !without_kernel().count(name)) return false;
  TORCH_CHECK_NOT_IMPLEMENTED(!settings().strict, "GCU has no kernel for ", name, complex ? " of complex numbers" : "",
                              ", and SIM_GCU_STRICT=1 forbids to run it on the CPU; write it with operators that the ",
                              "card has, or move the tensors to the CPU first");
  std::lock_guard<std::mutex> lock(mutex);
  bool first = counts[name]++ == 0;
  if (first || logs_each()) std::fprintf(stderr, "[TORCH_GCU/FALLBACK] %s falls back to the CPU\n", name.c_str());
  return true;
}

std::map<std::string, int64_t> fallbacks() {
  std::lock_guard<std::mutex> lock(mutex);
  return counts;
}

void reset_fallbacks() {
  std::lock_guard<std::mutex> lock(mutex);
  counts.clear();
}

}  // namespace simgcu
