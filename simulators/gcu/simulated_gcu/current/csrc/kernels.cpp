// What the card has no kernel for, and what the plug-in sends to the CPU although there is one.
//
// Two sources, both of the vendor's plug-in for torch 2.10: the list of registered kernels (native_operators.h; what is
// not on it and reaches the device goes to the generic fallback) and codegen/gcu_op_fallback.yaml, by card (below).
#include <c10/util/Exception.h>

#include <cctype>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <unordered_set>

#include "native_operators.h"
#include "runtime.h"

namespace simgcu {
namespace {

using Names = std::unordered_set<std::string>;

// Of a name such as add_.Tensor: add.
std::string base_of(const std::string& name) {
  auto base = name.substr(0, name.find('.'));
  if (base.size() > 1 && base.back() == '_' && base[base.size() - 2] != '_') base.pop_back();
  return base;
}

const Names& native() {
  static const auto* names = [] {
    auto* found = new Names;
    std::istringstream words(kNativeOperators);
    for (std::string word; words >> word;) found->insert(word.rfind("_foreach_", 0) == 0 ? word : base_of(word));
    // What a card's fused attention is here.
    found->insert({"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"});
    return found;
  }();
  return *names;
}

const Names& sent_by_s60() {
  static const Names names{"_softmax_backward_data", "convolution_backward", "embedding_dense_backward", "gelu_backward",
                           "_grouped_mm", "native_layer_norm_backward", "silu_backward", "tanh_backward",
                           "replication_pad1d", "log_sigmoid_forward", "_fused_adamw", "_log_softmax_backward_data",
                           "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact3d",
                           "nll_loss_backward", "sigmoid_backward", "bincount"};
  return names;
}

const Names& sent_by_l600() {
  static const Names names{"max_pool3d_with_indices", "scatter_reduce", "sinc", "sinh", "unique_consecutive"};
  return names;
}

// Kernels of complex numbers that are on the vendor's list; what else has a complex operand goes to the CPU.
bool takes_complex(const std::string& base) {
  static const Names names{"_fft_c2c", "_fft_c2r", "_fft_r2c", "angle", "polar", "view_as_complex", "view_as_real"};
  return names.count(base) > 0;
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
std::map<std::string, Fallback> counts;
std::map<std::string, int64_t> uses;

}  // namespace

Profile profile() {
  static const Profile chosen = [] {
    const char* value = getenv("SIM_GCU_PROFILE");
    std::string name(value ? value : "");
    TORCH_CHECK(name.empty() || name == "s60" || name == "l600", "SIM_GCU_PROFILE=", name, " is no card; write s60 or l600, ",
                "or leave it out for what either of them lacks");
    return name == "s60" ? Profile::s60 : name == "l600" ? Profile::l600 : Profile::both;
  }();
  return chosen;
}

bool is_native(const std::string& name) {
  return native().count(name.rfind("_foreach_", 0) == 0 ? name : base_of(name)) > 0;
}

bool is_sent_to_cpu(const std::string& name, const std::string& reduction) {
  const auto base = base_of(name);
  if (profile() != Profile::l600) {
    if (sent_by_s60().count(base)) return true;
    if (base == "scatter_reduce" && (reduction == "prod" || reduction == "mean")) return true;
  }
  return profile() != Profile::s60 && sent_by_l600().count(base);
}

bool falls_back(const std::string& name, const std::string& reduction, bool complex) {
  complex = complex && !takes_complex(base_of(name));
  if (!complex && is_native(name) && !is_sent_to_cpu(name, reduction)) return false;
  static const bool strict = [] {
    const char* value = getenv("SIM_GCU_STRICT");
    return value && std::string(value) == "1";
  }();
  TORCH_CHECK_NOT_IMPLEMENTED(!strict, "GCU has no kernel for aten::", name, complex ? " of complex numbers" : "",
                              ", and SIM_GCU_STRICT=1 forbids to run it on the CPU; write it with operators that the ",
                              "card has, or move the tensors to the CPU first");
  return true;
}

void count_fallback(const std::string& name, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& count = counts[name];
  bool first = count.calls++ == 0;
  count.bytes += bytes;
  if (first || logs_each()) fprintf(stderr, "[TORCH_GCU/FALLBACK] %s falls back to the CPU\n", name.c_str());
}

bool keeps_statistics() {
  static const bool on = [] {
    // As the vendor reads it: words between spaces, in any case.
    const char* config = getenv("ENFLAME_PT_OP_DEBUG_CONFIG");
    std::string text(config ? config : "");
    for (char& letter : text) letter = static_cast<char>(tolower(static_cast<unsigned char>(letter)));
    std::istringstream words(text);
    for (std::string word; std::getline(words, word, ' ');) {
      if (word == "op_statistics=true") return true;
    }
    return false;
  }();
  return on;
}

void count_use(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  uses[name]++;
}

std::map<std::string, int64_t> uses_of_operators() {
  std::lock_guard<std::mutex> lock(mutex);
  return uses;
}

void reset_uses() {
  std::lock_guard<std::mutex> lock(mutex);
  uses.clear();
}

std::map<std::string, Fallback> fallbacks() {
  std::lock_guard<std::mutex> lock(mutex);
  return counts;
}

void reset_fallbacks() {
  std::lock_guard<std::mutex> lock(mutex);
  counts.clear();
}

}  // namespace simgcu
