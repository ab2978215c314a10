// Programs of acm::steps: operators of a graph that read each other's results, run one after the other by one call. The
// text of a program is described in acm_compiler/acm/steps.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int64_t kGatedOperands = 22, kAbsent = -1;

struct Step {
  enum class Kind { gated, norm, attention } kind;
  std::vector<int64_t> operands;  // values by number: tensors of the call, then results of steps; or kAbsent
  std::vector<int64_t> done;      // results that no later step reads
  double cost = 0, scale = 0;
  int64_t k_min = 0, heads = 0, length = 0;
  std::string rule, form, act;
  std::optional<double> eps;
  bool centred = true, causal = false;
};

struct Program {
  int64_t tensors = 0;
  std::vector<Step> steps;
  std::vector<int64_t> results;

  explicit Program(const std::string& text) {
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ';');) {
      std::istringstream words(part);
      const std::string kind = word(words);
      if (kind == "tensors") tensors = integer(words);
      else if (kind == "results") while (words >> std::ws && !words.eof()) results.push_back(integer(words));
      else steps.push_back(step(kind, words));
    }
    note_done();
  }

 private:
  static std::string word(std::istringstream& words) {
    std::string next;
    TORCH_CHECK(words >> next, "a step of the program of acm::steps ends too early");
    return next;
  }
  static int64_t integer(std::istringstream& words) { return std::stoll(word(words)); }
  static double number(std::istringstream& words) { return std::strtod(word(words).c_str(), nullptr); }

  // whether a step goes without its operand of that number: all but tokens, gate, w_in and b_out of an ACM, a norm's input
  static bool may_be_absent(Step::Kind kind, int64_t operand) {
    if (kind == Step::Kind::gated) return operand > 8 && operand != 13;
    return kind == Step::Kind::norm && operand > 0;
  }

  // reads what belongs to a step, and checks that its operands are known by then
  Step step(const std::string& kind, std::istringstream& words) const {
    TORCH_CHECK(kind == "gated" || kind == "norm" || kind == "attention", "unknown step of acm::steps: ", kind);
    Step s{kind == "gated" ? Step::Kind::gated : kind == "norm" ? Step::Kind::norm : Step::Kind::attention};
    for (int64_t i = 0, count = kind == "gated" ? kGatedOperands : 3; i < count; i++) {
      const std::string operand = word(words);
      const bool optional = operand == "-" && may_be_absent(s.kind, i);
      const int64_t number = operand == "-" ? kAbsent : std::stoll(operand);
      TORCH_CHECK(optional || (number >= 0 && number < tensors + static_cast<int64_t>(steps.size())),
                  "acm::steps reads value ", operand, ", which is not there by then");
      s.operands.push_back(number);
    }
    if (s.kind == Step::Kind::gated)
      s.cost = number(words), s.k_min = integer(words), s.rule = word(words), s.form = word(words), s.act = word(words);
    if (s.kind == Step::Kind::attention)
      s.heads = integer(words), s.length = integer(words), s.causal = integer(words), s.scale = number(words);
    else {
      const std::string eps = word(words);
      if (eps != "-") s.eps = std::strtod(eps.c_str(), nullptr);
      s.centred = integer(words);
    }
    return s;
  }

  void note_done() {
    std::vector<Step*> last(steps.size(), nullptr);
    for (Step& s : steps)
      for (const int64_t operand : s.operands)
        if (operand >= tensors) last[operand - tensors] = &s;
    for (const int64_t result : results) last.at(result - tensors) = nullptr;
    for (size_t i = 0; i < last.size(); i++)
      if (last[i]) last[i]->done.push_back(i);
  }
};

// the program of that text, read once
inline std::shared_ptr<const Program> program_of(std::string_view text) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Program>, std::less<>> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(text);
  if (found != known.end()) return found->second;
  const std::string whole(text);
  return known[whole] = std::make_shared<const Program>(whole);
}

}  // namespace
