// What the card has no kernel for, and sends back to the CPU one operator at a time.
//
// The vendor publishes no list by operator; this one follows what its documentation says of whole kinds: no complex
// numbers, no FFT, no sparse and no quantised tensors. The matrix decompositions and the fused recurrent cells are here
// because their kernels would be LAPACK's and cuDNN's.
#include <c10/util/Exception.h>

#include <cstdio>
#include <mutex>
#include <unordered_set>

#include "runtime.h"

namespace simgcu {
namespace {

const std::unordered_set<std::string>& without_kernel() {
  static const std::unordered_set<std::string> names{
      // FFT
      "aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c",
      // complex numbers
      "aten::complex", "aten::polar", "aten::angle", "aten::_conj_physical", "aten::view_as_complex_copy",
      // matrix decompositions and solvers
      "aten::_linalg_svd", "aten::_linalg_eigh", "aten::_linalg_eigvals", "aten::linalg_eig", "aten::linalg_qr",
      "aten::linalg_cholesky_ex", "aten::linalg_inv_ex", "aten::linalg_lu_factor_ex", "aten::linalg_lu",
      "aten::linalg_lu_solve", "aten::_linalg_solve_ex", "aten::linalg_solve_triangular", "aten::linalg_lstsq",
      "aten::linalg_ldl_factor_ex", "aten::linalg_householder_product", "aten::_linalg_det", "aten::_linalg_slogdet",
      "aten::geqrf", "aten::ormqr", "aten::cholesky", "aten::cholesky_solve", "aten::triangular_solve",
      "aten::linalg_matrix_exp"};
  return names;
}

// The vendor's switches for its log of fallbacks.
bool logs_each() {
  static const bool on = [] {
    const char* level = getenv("ENFLAME_LOG_DEBUG_LEVEL");
    const char* module = getenv("ENFLAME_LOG_DEBUG_MOD");
    return level && module && std::string(level) == "DEBUG" &&
           std::string(module).find("TORCH_GCU/FALLBACK") != std::string::npos;
  }();
  return on;
}

std::mutex mutex;
std::map<std::string, int64_t> counts;

}  // namespace

void check_supported(const std::string& name, bool complex) {
  if (!complex && !without_kernel().count(name)) return;
  static const bool strict = [] {
    const char* value = getenv("SIM_GCU_STRICT");
    return value && std::string(value) == "1";
  }();
  TORCH_CHECK_NOT_IMPLEMENTED(!strict, "GCU has no kernel for ", name, complex ? " of complex numbers" : "",
                              ", and SIM_GCU_STRICT=1 forbids to run it on the CPU; write it with operators that the ",
                              "card has, or move the tensors to the CPU first");
  std::lock_guard<std::mutex> lock(mutex);
  bool first = counts[name]++ == 0;
  if (first || logs_each()) fprintf(stderr, "[TORCH_GCU/FALLBACK] %s falls back to the CPU\n", name.c_str());
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
