// acm_package::learners, ::gate and ::gated_learners: the operators as packages of AOTInductor call them, in processes
// without Python, and ::require, which refuses inputs. Their schemas are in this library, and each call says what it was
// exported with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <string>
#include <string_view>

#ifndef ACM_BUILT
#define ACM_BUILT "unknown sources"
#endif

namespace {

// The operator of that name, as whoever was first has defined it. A library beside a package may be loaded after another.
inline auto defined(const char* name) { return c10::Dispatcher::singleton().findSchema({name, ""}); }

// What runs a call that no kernel covers, or says what is wrong with it: an operator that Python defines.
template <typename Signature>
auto reference_of(const char* name) {
  const auto found = defined(name);
  TORCH_CHECK(found, "operands of an ACM that the native CPU kernel does not take, and ", name,
              ", which would say why, is not there: in Python, import acm_compiler.acm");
  return found->template typed<Signature>();
}

// whether this processor runs what the compiler was allowed to use
inline bool runs_here() {
#ifdef __AVX512F__
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return false;
#endif
#ifdef __AVX512BF16__
  if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
#ifdef __AVX512VNNI__
  if (!__builtin_cpu_supports("avx512vnni")) return false;
#endif
#ifdef __AVXVNNI__
  if (!__builtin_cpu_supports("avxvnni")) return false;
#endif
#ifdef __AVX2__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
#endif
#if defined(__linux__) && defined(__ARM_FEATURE_DOTPROD)
  if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return false;
#endif
#if defined(__linux__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if (!(getauxval(AT_HWCAP2) & HWCAP2_BF16)) return false;
#endif
  return true;
}

inline void require_here(std::string_view built) {
  TORCH_CHECK(built == ACM_BUILT, "this package was exported with ", std::string(built),
              ", and the operators of ACMs that are loaded are of " ACM_BUILT
              ": load acm_operators.so of the same export, and none of another version in one process");
  static const bool same_torch = aoti_torch_abi_version() == TORCH_ABI_VERSION;
  TORCH_CHECK(same_torch, "acm_operators.so was built for torch ", TORCH_VERSION,
              ", and another one is loaded: export again with the torch that runs the package");
  static const bool here = runs_here();
  TORCH_CHECK(here, "acm_operators.so was built for a processor with more vector instructions than this one has: "
              "export on a processor of this kind");
}

// an operator's kernel with one more argument: what the package was exported with
template <auto kernel>
struct Packaged;
template <typename... Args, at::Tensor (*kernel)(Args...)>
struct Packaged<kernel> {
  static at::Tensor call(Args... args, std::string_view built) {
    require_here(built);
    return kernel(args...);
  }
};

// A copy of `value`, or an error that ends in the first number for which a condition does not hold. Packages look at no
// input's shape or type: a condition of another shape was computed from what is not there.
inline at::Tensor require(const at::Tensor& value, const at::Tensor& holds, std::string_view message) {
  const at::Tensor each = holds.contiguous();
  const std::string_view name = message.substr(0, message.find(' '));
  TORCH_CHECK(value.numel() == each.numel(), name, " must have the shape ", each.sizes(),
              each.dim() ? ", one value per example" : ", one number", ", got ", value.sizes());
  TORCH_CHECK(!value.is_floating_point() || value.scalar_type() == at::kFloat, name, " must be float32, got ",
              value.scalar_type());
  const bool* from = each.const_data_ptr<bool>();
  const int64_t place = std::find(from, from + each.numel(), false) - from;
  TORCH_CHECK(place == each.numel(), message, ", got ", value.reshape({-1})[place].item<double>());
  return value.clone();
}

}  // namespace
