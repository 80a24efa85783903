// What the card has no kernel for, and what the plug-in sends to the CPU although there is one: by the table of the
// vendor's plug-in (operators.txt), overload by overload. What is not in it and reaches the device goes to the CPU.
#include <c10/util/Exception.h>

#include <cctype>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "operators.inc"  // kOperators: the text of the table, put there by build.py
#include "runtime.h"

namespace simgcu {
namespace {

using Names = std::unordered_set<std::string>;

// Names of overloads, such as add_.Tensor, by heading.
const std::unordered_map<std::string, Names>& table() {
  static const auto* sections = [] {
    auto* found = new std::unordered_map<std::string, Names>;
    std::istringstream lines(kOperators);
    std::string heading;
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line[0] == '#') continue;
      if (line[0] == '[') {
        heading = line.substr(1, line.size() - 2);
        continue;
      }
      std::istringstream words(line);
      for (std::string word; words >> word;) (*found)[heading].insert(word);
    }
    // What a card's fused attention is here.
    (*found)["card"].insert(
        {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"});
    return found;
  }();
  return *sections;
}

// Under "cpu on <card>", or "cpu on <card> if reduce=<values>".
bool is_sent_by(const std::string& card, const std::string& name, const std::string& reduction) {
  const auto start = "cpu on " + card;
  for (const auto& [heading, names] : table()) {
    if (heading.rfind(start, 0) != 0 || !names.count(name)) continue;
    const auto values = heading.find('=');
    if (values == std::string::npos) return true;
    if (("," + heading.substr(values + 1) + ",").find("," + reduction + ",") != std::string::npos) return true;
  }
  return false;
}

// Kernels of complex numbers that are on the vendor's list; what else has a complex operand goes to the CPU.
bool takes_complex(const std::string& name) {
  static const Names names{"_fft_c2c", "_fft_c2r", "_fft_r2c", "polar", "view_as_complex", "view_as_real"};
  return names.count(name.substr(0, name.find('.'))) > 0;
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

bool is_native(const std::string& name) { return table().at("card").count(name) > 0; }

bool is_sent_to_cpu(const std::string& name, const std::string& reduction) {
  return (profile() != Profile::l600 && is_sent_by("s60", name, reduction)) ||
         (profile() != Profile::s60 && is_sent_by("l600", name, reduction));
}

bool falls_back(const std::string& name, const std::string& reduction, bool complex) {
  complex = complex && !takes_complex(name);
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
