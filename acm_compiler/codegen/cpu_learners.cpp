// acm::learners on the CPU: y_k(x) + residual of every token, at the cost of the learners that it runs.
//
// Shapes: T tokens, D in, O out, N learners, H learner width (forms "rows" and "cols": its slice of G heads). Tokens are sorted by k, highest first (a counting sort),
// and cut into chunks of equal work. Inside a chunk the tokens that run learner n are a prefix, so each learner is two
// matrix products over that prefix, with bias and activation applied while the hidden values are still in the cache.
// Where learners are too small for efficient products, a chunk runs all learners of its tokens at once, k by k.
// Threads take chunks; the matrix products inside a chunk are single-threaded. What this file does not cover (other
// types, composite activations, an illegal k) it hands to acm::learners_reference.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cpu_activations.h"
#include "cpu_gate.h"

// libtorch carries a BLAS; where it does not export this symbol, the address is null and at::mm takes over
extern "C" __attribute__((weak)) void sgemm_(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
    const float*, const int*, const float*, float*, const int*);

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// ---- matrix products --------------------------------------------------------------------------------------------

template <typename T>
Tensor view(const T* data, int64_t rows, int64_t cols, int64_t stride) {
  return at::from_blob(const_cast<T*>(data), {rows, cols}, {stride, 1}, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
}

// c[rows, cols] = a[rows, depth] b[cols, depth]^T, or += with accumulate
void product(int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
             float* c, bool accumulate) {
  if (sgemm_ != nullptr) {
    const int m = cols, n = rows, k = depth, la = ldb, lb = lda, lc = cols;
    const float alpha = 1.f, beta = accumulate ? 1.f : 0.f;
    sgemm_("T", "N", &m, &n, &k, &alpha, b, &la, a, &lb, &beta, c, &lc);
    return;
  }
  Tensor out = view(c, rows, cols, cols);
  const Tensor left = view(a, rows, depth, lda), right = view(b, cols, depth, ldb).t();
  accumulate ? at::addmm_out(out, out, left, right) : at::mm_out(out, left, right);
}

void product(int64_t rows, int64_t cols, int64_t depth, const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b,
             int64_t ldb, c10::BFloat16* c) {
  Tensor out = view(c, rows, cols, cols);
  at::mm_out(out, view(a, rows, depth, lda), view(b, cols, depth, ldb).t());
}

// ---- one call ---------------------------------------------------------------------------------------------------

constexpr int64_t kChunkRows = 512;  // enough rows to pay for packing the weights, few enough to stay in the cache
constexpr int64_t kFewRows = 32;     // below this many rows per thread a chunk is not worth a thread of its own

constexpr int64_t kSmallLearner = 1 << 17;  // weights of a learner's first layer below which products want company

template <typename T>
const T* data_of(const Maybe& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

enum class Form { mlp, gated, linear, rows, cols };
constexpr std::string_view kFormNames[] = {"mlp", "gated", "linear", "rows", "cols"};

std::optional<Form> find_form(std::string_view name) {
  const auto* found = std::find(std::begin(kFormNames), std::end(kFormNames), name);
  if (found == std::end(kFormNames)) return std::nullopt;
  return static_cast<Form>(found - std::begin(kFormNames));
}

template <typename T>
struct Call {
  static constexpr bool kWide = std::is_same_v<T, float>;  // sums are kept in float; T = float needs no copies
  int64_t tokens, d_in, d_out, learners, width, heads;
  const T *x, *w_in, *b_in, *w_up, *b_up, *w_out, *b_out, *w_top, *residual;
  int64_t x_stride;
  bool per_k;
  Form form;
  Act act;
  T* out;
  std::vector<int64_t> order;     // token of each sorted place
  std::vector<int64_t> at_least;  // [N + 2]: how many tokens run at least k learners
  std::vector<int64_t> cuts;      // borders of the chunks, in sorted places

  // ---- sorting and cutting

  // false when some k lies outside [0, N]
  template <typename K>
  bool sort(const K* k) {
    std::vector<int64_t> place(learners + 1, 0);
    for (int64_t t = 0; t < tokens; t++) {
      if (k[t] < 0 || k[t] > learners) return false;
      place[k[t]]++;
    }
    at_least.assign(learners + 2, 0);
    for (int64_t n = learners; n >= 0; n--) at_least[n] = at_least[n + 1] + place[n];
    for (int64_t n = 0; n <= learners; n++) place[n] = at_least[n + 1];
    order.resize(tokens);
    for (int64_t t = 0; t < tokens; t++) order[place[k[t]]++] = t;
    return true;
  }

  // how many learners the token at a sorted place runs
  int64_t k_at(int64_t place) const {
    int64_t k = learners;
    while (place >= at_least[k]) k--;
    return k;
  }

  // chunks of equal work over the tokens with k >= 1
  void cut() {
    const int64_t busy = at_least[1], threads = at::get_num_threads();
    int64_t work = 0;
    for (int64_t k = 1; k <= learners; k++) work += at_least[k];
    int64_t count = std::max<int64_t>(1, (busy + kChunkRows - 1) / kChunkRows);
    if (threads > 1 && busy >= kFewRows * threads) count = (count + threads - 1) / threads * threads;
    cuts.assign(1, 0);
    int64_t done = 0;
    for (int64_t place = 0, k = learners; place < busy; place++) {
      while (place >= at_least[k]) k--;
      done += k;
      const bool full = place + 1 - cuts.back() >= 2 * kChunkRows;
      if (done * count >= work * static_cast<int64_t>(cuts.size()) || full || place + 1 == busy) cuts.push_back(place + 1);
    }
  }

  // ---- one chunk

  struct Buffers { T *x, *h, *up, *part; float *sums, *scratch; };

  // start + residual: what a token's sum starts from
  void start_row(int64_t token, int64_t k, float* sum) const {
    const T* b = b_out + k * d_out;
    const T* r = residual ? residual + token * d_out : nullptr;
    if constexpr (kWide) {
      if (!r) { std::memcpy(sum, b, d_out * sizeof(float)); return; }
    }
    for (int64_t j = 0; j < d_out; j++) sum[j] = static_cast<float>(b[j]) + (r ? static_cast<float>(r[j]) : 0.f);
  }

  void store_row(int64_t token, const float* sum) const { at::vec::convert(sum, out + token * d_out, d_out); }

  // sums[rows, O] += a[rows, depth] w[O, depth]^T
  void add_product(int64_t rows, int64_t depth, const T* a, const T* w, int64_t ldw, float* sums, T* part) const {
    if constexpr (kWide) {
      product(rows, d_out, depth, a, depth, w, ldw, sums, true);
    } else {
      product(rows, d_out, depth, a, depth, w, ldw, part);
      for (int64_t i = 0; i < rows * d_out; i++) sums[i] += static_cast<float>(part[i]);
    }
  }

  void in_product(int64_t rows, int64_t cols, const T* rows_x, int64_t ldx, const T* w, T* h) const {
    if constexpr (kWide) product(rows, cols, d_in, rows_x, ldx, w, d_in, h, false);
    else product(rows, cols, d_in, rows_x, ldx, w, d_in, h);
  }

  // h[rows, count * H] = hidden values of `count` learners from n on
  void hidden(int64_t rows, int64_t n, int64_t count, const T* rows_x, int64_t ldx, const Buffers& buf) const {
    const int64_t cols = count * width, start = n * width;
    in_product(rows, cols, rows_x, ldx, w_in + start * d_in, buf.h);
    if (w_up) in_product(rows, cols, rows_x, ldx, w_up + start * d_in, buf.up);
    if (act == Act::identity && !b_in && !w_up) return;
    activate(rows, cols, buf.h, w_up ? buf.up : nullptr, b_in ? b_in + start : nullptr, b_up ? b_up + start : nullptr,
             buf.scratch);
  }

  void activate(int64_t rows, int64_t cols, T* h, const T* up, const T* b, const T* b2, float* scratch) const {
    with_act(act, [&](const auto& f) {
      if constexpr (kWide) {
        for (int64_t i = 0; i < rows; i++) act_row(f, h + i * cols, b, up ? up + i * cols : nullptr, b2, cols);
      } else {
        float *fh = scratch, *fu = fh + cols, *fb = fu + cols, *fb2 = fb + cols;
        if (b) at::vec::convert(b, fb, cols);
        if (b2) at::vec::convert(b2, fb2, cols);
        for (int64_t i = 0; i < rows; i++) {
          at::vec::convert(h + i * cols, fh, cols);
          if (up) at::vec::convert(up + i * cols, fu, cols);
          act_row(f, fh, b ? fb : nullptr, up ? fu : nullptr, b2 ? fb2 : nullptr, cols);
          at::vec::convert(fh, h + i * cols, cols);
        }
      }
    });
  }

  // the second layer [O, N * H] of tokens that run k learners
  const T* second_layer(int64_t k) const {
    if (k == learners && w_top) return w_top;
    return per_k ? w_out + (k - 1) * d_out * learners * width : w_out;
  }

  // sums += the second layer of learner n for the sorted places [first, stop), one product per run of equal matrices
  void add_second_layer(int64_t n, int64_t first, int64_t stop, const T* h, float* sums, T* part) const {
    for (int64_t from = first; from < stop;) {
      int64_t k = k_at(from), to = std::min(stop, at_least[k]);
      const T* w = second_layer(k);
      while (to < stop && second_layer(k_at(to)) == w) to = std::min(stop, at_least[k_at(to)]);
      const int64_t skip = from - first;
      add_product(to - from, width, h + skip * width, w + n * width, learners * width, sums + skip * d_out, part);
      from = to;
    }
  }

  static int64_t padded(int64_t count) { return (count + 31) / 32 * 32; }

  // this thread's buffers for chunks of `rows` tokens; kept between calls
  Buffers buffers(int64_t rows) const {
    static thread_local std::vector<float> memory;
    const int64_t cols = by_k() ? learners * width : width;
    const int64_t sizes[] = {padded(rows * d_in), padded(rows * cols), w_up ? padded(rows * cols) : 0,
                             kWide ? 0 : padded(rows * d_out), padded(rows * d_out), 4 * padded(cols)};
    int64_t total = 16;
    for (int64_t size : sizes) total += size;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    float* next = memory.data();
    auto take = [&](int i) { float* start = next; next += sizes[i]; return start; };
    Buffers b;
    b.x = reinterpret_cast<T*>(take(0));
    b.h = reinterpret_cast<T*>(take(1));
    b.up = reinterpret_cast<T*>(take(2));
    b.part = reinterpret_cast<T*>(take(3));
    b.sums = take(4);
    b.scratch = take(5);
    return b;
  }

  // whether sorted places follow each other in memory too, so that nothing needs gathering
  bool in_place(int64_t first, int64_t stop) const {
    for (int64_t p = first + 1; p < stop; p++)
      if (order[p] != order[p - 1] + 1) return false;
    return true;
  }

  void run_chunk(int64_t first, int64_t stop) const {
    const int64_t rows = stop - first;
    const Buffers buf = buffers(rows);
    const bool together = in_place(first, stop);
    const T* rows_x = together ? x + order[first] * x_stride : buf.x;
    const int64_t ldx = together ? x_stride : d_in;
    float* sums = buf.sums;
    if constexpr (kWide) { if (together) sums = out + order[first] * d_out; }
    for (int64_t i = 0; i < rows; i++) {
      const int64_t token = order[first + i];
      if (!together) std::memcpy(buf.x + i * d_in, x + token * x_stride, d_in * sizeof(T));
      start_row(token, k_at(first + i), sums + i * d_out);
    }
    run_learners(first, stop, rows_x, ldx, sums, buf);
    if (kWide && together) return;
    for (int64_t i = 0; i < rows; i++) store_row(order[first + i], sums + i * d_out);
  }

  void run_learners(int64_t first, int64_t stop, const T* rows_x, int64_t ldx, float* sums, const Buffers& buf) const {
    int64_t skip = 0;  // tokens whose k = N is the dense weight itself
    if (form == Form::linear && w_top) {
      skip = std::max<int64_t>(0, std::min(stop, at_least[learners]) - first);
      if (skip) add_dense(skip, rows_x, ldx, sums, buf.part);
    }
    const T* xs = rows_x + skip * ldx;
    sums += skip * d_out;
    first += skip;
    if (form == Form::cols) run_columns(first, stop, xs, ldx, sums, buf);
    else if (by_k()) run_by_k(first, stop, xs, ldx, sums, buf);
    else run_by_learner(first, stop, xs, ldx, sums, buf);
  }

  bool by_k() const { return form == Form::rows || width * d_in < kSmallLearner; }

  void run_by_learner(int64_t first, int64_t stop, const T* xs, int64_t ldx, float* sums, const Buffers& buf) const {
    for (int64_t n = 0; n < learners; n++) {
      const int64_t to = std::min(stop, at_least[n + 1]);
      if (to <= first) break;
      hidden(to - first, n, 1, xs, ldx, buf);
      add_second_layer(n, first, to, buf.h, sums, buf.part);
    }
  }

  void run_by_k(int64_t first, int64_t stop, const T* xs, int64_t ldx, float* sums, const Buffers& buf) const {
    for (int64_t from = first; from < stop;) {
      const int64_t k = k_at(from), to = std::min(stop, at_least[k]), rows = to - from;
      float* run_sums = sums + (from - first) * d_out;
      hidden(rows, 0, k, xs + (from - first) * ldx, ldx, buf);
      if (form == Form::rows) put_slices(rows, k, buf.h, run_sums);
      else add_product(rows, k * width, buf.h, second_layer(k), learners * width, run_sums, buf.part);
      from = to;
    }
  }

  void run_columns(int64_t first, int64_t stop, const T* xs, int64_t ldx, float* sums, const Buffers& buf) const {
    for (int64_t n = 0; n < learners; n++) {
      const int64_t rows = std::min(stop, at_least[n + 1]) - first;
      if (rows <= 0) break;
      take_slices(rows, n, xs, ldx, buf.h);
      add_product(rows, width, buf.h, w_in + n * d_out * width, width, sums, buf.part);
    }
  }

  // h[rows, G, H / G] = what learner n reads of x seen as [rows, G, N, H / G]
  void take_slices(int64_t rows, int64_t n, const T* rows_x, int64_t ldx, T* h) const {
    const int64_t part = width / heads;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t g = 0; g < heads; g++)
        std::memcpy(h + i * width + g * part, rows_x + i * ldx + (g * learners + n) * part, part * sizeof(T));
  }

  // sums, seen as [rows, G, N, H / G], += the rows h[rows, k, G, H / G] of the first k learners
  void put_slices(int64_t rows, int64_t k, const T* h, float* sums) const {
    const int64_t part = width / heads;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t n = 0; n < k; n++)
        for (int64_t g = 0; g < heads; g++) {
          const T* from = h + ((i * k + n) * heads + g) * part;
          float* to = sums + i * d_out + (g * learners + n) * part;
          for (int64_t j = 0; j < part; j++) to[j] += static_cast<float>(from[j]);
        }
  }

  void add_dense(int64_t rows, const T* rows_x, int64_t ldx, float* sums, T* part) const {
    if constexpr (kWide) {
      product(rows, d_out, d_in, rows_x, ldx, w_top, d_in, sums, true);
    } else {
      product(rows, d_out, d_in, rows_x, ldx, w_top, d_in, part);
      for (int64_t i = 0; i < rows * d_out; i++) sums[i] += static_cast<float>(part[i]);
    }
  }

  void run_idle(int64_t first, int64_t stop) const {
    std::vector<float> sum(kWide ? 0 : d_out);
    for (int64_t p = first; p < stop; p++) {
      if constexpr (kWide) {
        start_row(order[p], 0, out + order[p] * d_out);
      } else {
        start_row(order[p], 0, sum.data());
        store_row(order[p], sum.data());
      }
    }
  }

  void run() {
    const int64_t chunks = cuts.size() - 1;
    at::parallel_for(at_least[1], tokens, 256, [&](int64_t first, int64_t stop) { run_idle(first, stop); });
    if (at_least[1] == 0) return;
    std::atomic<int64_t> next{0};
    auto work = [&](int64_t, int64_t) {
      for (int64_t c = next++; c < chunks; c = next++) run_chunk(cuts[c], cuts[c + 1]);
    };
    if (chunks == 1) work(0, 1);  // a single chunk: the matrix products may use all threads
    else at::parallel_for(0, std::min<int64_t>(chunks, at::get_num_threads()), 1, work);
  }
};

// ---- the operator -----------------------------------------------------------------------------------------------

using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Maybe&, const Maybe&, const Maybe&,
                         const Maybe&, const Tensor&, const Maybe&, const Maybe&, std::string_view, std::string_view);

Maybe packed(const Maybe& tensor) { return tensor ? Maybe(tensor->contiguous()) : Maybe(); }

template <typename T>
bool run(const Tensor& x, const Tensor& k, const Tensor& w_in, const Maybe& b_in, const Maybe& w_up, const Maybe& b_up,
         const Maybe& w_out, const Tensor& b_out, const Maybe& w_top, const Maybe& residual, Form form, Act act,
         Tensor& y) {
  Call<T> call;
  call.tokens = x.size(0), call.d_in = x.size(1), call.d_out = b_out.size(1);
  call.learners = w_in.size(0), call.width = w_in.size(1), call.heads = 1;
  if (form == Form::rows) call.heads = w_in.size(1), call.width = w_in.size(1) * w_in.size(2);
  if (form == Form::cols) call.heads = w_in.size(2), call.width = w_in.size(2) * w_in.size(3);
  call.x = x.const_data_ptr<T>(), call.x_stride = x.stride(0);
  call.w_in = w_in.const_data_ptr<T>(), call.b_out = b_out.const_data_ptr<T>();
  call.b_in = data_of<T>(b_in), call.w_up = data_of<T>(w_up), call.b_up = data_of<T>(b_up);
  call.w_out = data_of<T>(w_out), call.w_top = data_of<T>(w_top), call.residual = data_of<T>(residual);
  call.form = form, call.per_k = w_out && w_out->dim() == 4, call.act = act;
  call.out = y.mutable_data_ptr<T>();
  const bool legal = k.scalar_type() == at::kInt ? call.sort(k.const_data_ptr<int32_t>())
                                                 : call.sort(k.const_data_ptr<int64_t>());
  if (!legal) return false;
  call.cut();
  call.run();
  return true;
}

bool covered(const Tensor& x, const Tensor& k, const Maybe& w_out, const std::vector<const Maybe*>& others,
             const std::optional<Form>& form, const std::optional<Act>& act) {
  const auto type = x.scalar_type();
  if (!form || !act || (type != at::kFloat && type != at::kBFloat16)) return false;
  if (!w_out && form != Form::rows && form != Form::cols) return false;
  if (k.scalar_type() != at::kInt && k.scalar_type() != at::kLong) return false;
  return std::all_of(others.begin(), others.end(), [&](const Maybe* t) { return !*t || (*t)->scalar_type() == type; });
}

Tensor learners(const Tensor& x, const Tensor& k, const Tensor& w_in, const Maybe& b_in, const Maybe& w_up,
                const Maybe& b_up, const Maybe& w_out, const Tensor& b_out, const Maybe& w_top, const Maybe& residual,
                std::string_view form_name, std::string_view act_name) {
  static const auto reference =
      c10::Dispatcher::singleton().findSchemaOrThrow("acm::learners_reference", "").typed<Signature>();
  const auto act = find_act(act_name);
  const auto form = find_form(form_name);
  const Maybe first = w_in, last = b_out;
  if (covered(x, k, w_out, {&first, &b_in, &w_up, &b_up, &w_out, &last, &w_top, &residual}, form, act)) {
    const Tensor xs = x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous();
    const Tensor ks = k.contiguous(), wi = w_in.contiguous(), bo = b_out.contiguous();
    const Maybe bi = packed(b_in), wu = packed(w_up), bu = packed(b_up), wo = packed(w_out), wt = packed(w_top),
                rs = packed(residual);
    Tensor y = at::empty({x.size(0), b_out.size(1)}, x.options());
    const bool done = x.scalar_type() == at::kFloat
        ? run<float>(xs, ks, wi, bi, wu, bu, wo, bo, wt, rs, *form, *act, y)
        : run<c10::BFloat16>(xs, ks, wi, bi, wu, bu, wo, bo, wt, rs, *form, *act, y);
    if (done) return y;
  }
  return reference.call(x, k, w_in, b_in, w_up, b_up, w_out, b_out, w_top, residual, form_name, act_name);
}

TORCH_LIBRARY_FRAGMENT(acm, m) {
  m.def(
      "learners_cpu(Tensor x, Tensor k, Tensor w_in, Tensor? b_in, Tensor? w_up, Tensor? b_up, Tensor? w_out, "
      "Tensor b_out, Tensor? w_top, Tensor? residual=None, *, str form, str act) -> Tensor");
  m.impl("learners_cpu", c10::DispatchKey::CPU, TORCH_FN(learners));
  m.def("gate_cpu" ACM_GATE_SCHEMA);
  m.impl("gate_cpu", c10::DispatchKey::CPU, TORCH_FN(gate));
}

}  // namespace

// makes these the CPU implementations of acm::learners and acm::gate
extern "C" __attribute__((visibility("default"))) void acm_take_over() {
  static torch::Library library(torch::Library::IMPL, "acm", c10::DispatchKey::CPU, __FILE__, __LINE__);
  static const bool done = [] {
    library.impl("learners", TORCH_FN(learners));
    library.impl("gate", TORCH_FN(gate));
    return true;
  }();
  (void)done;
}
