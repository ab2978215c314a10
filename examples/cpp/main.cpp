// Runs an exported package in C++, without Python: one input at several budgets.
//
//     run_package FOLDER INPUT OUTPUT BUDGET...
//
// FOLDER is what `acmc export DIR --format aoti` writes, of a model with one input. INPUT is a tensor that Python saved by
// torch.save; OUTPUT will be a tensor for torch.load: the outputs, one after the other.

#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

int main(int count, char** words) try {
  if (count < 5) throw std::runtime_error("expected: run_package FOLDER INPUT OUTPUT BUDGET...");
  const std::string folder = words[1];
  // else the package does not look at shapes and types of what it is given
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);
  // the operators of ACMs: from here on torch knows them; a package for a GPU needs none
  const std::string library = folder + "/acm_operators.so";
  if (std::ifstream(library) && !dlopen(library.c_str(), RTLD_NOW)) throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader model(folder + "/package.pt2");

  std::ifstream input(words[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(input), {}};
  const at::Tensor x = torch::jit::pickle_load(bytes).toTensor();

  const c10::InferenceMode guard;
  std::vector<at::Tensor> outputs;
  for (int i = 4; i < count; i++) {
    const at::Tensor budget = at::scalar_tensor(std::stod(words[i]), x.options().dtype(at::kFloat));
    outputs.push_back(model.run({x, budget}).at(0));
    std::cout << "budget " << words[i] << ": " << outputs.back().sizes() << "\n";
  }
  const std::vector<char> saved = torch::jit::pickle_save(at::stack(outputs));
  std::ofstream(words[3], std::ios::binary).write(saved.data(), saved.size());
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << "\n";
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
