// Panels of weights: made once for a call, or kept from call to call for as long as a weight's memory lives and nothing
// writes to it.
#pragma once

#include <ATen/MapAllocator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "share.h"

namespace {

using Panels = std::shared_ptr<void>;

inline std::atomic<bool> panels_kept{true};    // whether calls keep what they pack
inline std::atomic<int64_t> columns_packed{0};  // so many parts of columns, since they were asked for; for tests

inline Panels new_panels(int64_t words) {
  constexpr std::align_val_t kLine{64};
  return {::operator new(words * sizeof(float), kLine), [](void* p) { ::operator delete(p, kLine); }};
}

// Offloaded weights lie in files without a name, because memory does not hold them; it does not hold copies either.
inline bool is_offloaded(const at::Tensor& weight) {
  constexpr const char* kNameless = "/dev/fd/";
  const auto* file = at::MapAllocator::fromDataPtr(weight.storage().data_ptr());
  return file && std::strncmp(file->filename(), kNameless, std::strlen(kNameless)) == 0;
}

// What is not counted when it is written (torch's inference tensors) can have no panels kept.
inline bool may_be_kept(const at::Tensor& weight) {
  return panels_kept.load(std::memory_order_relaxed) && !weight.is_inference() && weight.is_contiguous() &&
         !is_offloaded(weight);
}

// A weight of a call.
template <typename T>
struct Weight {
  const at::Tensor* tensor = nullptr;
  const T* data = nullptr;

  Weight() = default;
  explicit Weight(const at::Tensor& weight) : tensor(&weight), data(weight.const_data_ptr<T>()) {}
  explicit Weight(const std::optional<at::Tensor>& weight) {
    if (weight) *this = Weight(*weight);
  }
  explicit operator bool() const { return data; }
};

// Some words of a weight, spread over all of it. Torch does not count what is written through `.data`, which is seldom
// so little that none of these changes.
inline uint64_t some_words(const at::Tensor& weight) {
  constexpr int64_t kWords = 64, kBytes = sizeof(uint32_t), kChains = 4;  // which do not wait for each other
  const auto* bytes = static_cast<const char*>(weight.const_data_ptr());
  const int64_t count = static_cast<int64_t>(weight.nbytes()) / kBytes, last = count - 1;
  const int64_t words = std::min(kWords, round_up(count, kChains));
  uint64_t mixed[kChains] = {};
  for (int64_t i = 0; i < words; i += kChains)
    for (int64_t c = 0; c < kChains; c++) {
      uint32_t word;
      std::memcpy(&word, bytes + (words < kWords ? std::min(i + c, last) : (i + c) * last / (kWords - 1)) * kBytes, kBytes);
      mixed[c] = (mixed[c] ^ word) * 0x9e3779b97f4a7c15u + i;
    }
  return std::accumulate(mixed, mixed + kChains, uint64_t{0}, [](uint64_t all, uint64_t one) {
    return (all ^ one) * 0x9e3779b97f4a7c15u + (all >> 32);
  });
}

// Some words of the weights of one call, read once however many matrices are parts of a weight: they are spread over
// memory that no cache holds.
class SomeWords {
 public:
  uint64_t of(const at::Tensor& weight) {
    for (const auto& [tensor, words] : read_)
      if (tensor == &weight) return words;
    read_.emplace_back(&weight, some_words(weight));
    return read_.back().second;
  }

 private:
  c10::SmallVector<std::pair<const at::Tensor*, uint64_t>, 16> read_;
};

// where a matrix is, its columns, depth, stride and pieces, and what its panels are of: `halves`: floats made of bfloat16;
// `gate`: a gate's two layers (gate.h), with its choices and a number of its kind for stride and pieces; `rows`: a
// transpose (sparse.h), with the bytes of a value for pieces
enum class Layout { bytes, nibbles, floats, pairs, halves, gate, rows };
using PanelKey = std::tuple<const void*, int64_t, int64_t, int64_t, int64_t, Layout>;

// a weight as it was when panels were made of it
class Stamp {
 public:
  explicit Stamp(const at::Tensor& weight)
      : storage_(weight.storage().getWeakStorageImpl()), data_(weight.const_data_ptr()), version_(weight._version()),
        some_(some_words(weight)) {}

  bool is_gone() const { return storage_.expired(); }
  bool is_of(const at::Tensor& weight, SomeWords& read) const {
    return storage_._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() && !is_gone() &&
           data_ == weight.const_data_ptr() && version_ == weight._version() && some_ == read.of(weight);
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const void* data_;
  int64_t version_;
  uint64_t some_;
};

class KeptPanels {
 public:
  using Weights = c10::ArrayRef<const at::Tensor*>;

  static KeptPanels& all() {
    static KeptPanels* kept = new KeptPanels;  // never destroyed: threads may outlive static objects
    return *kept;
  }

  // the panels of a matrix that is part of those weights; null where there are none, or a weight was written since
  Panels find(const PanelKey& key, const Weights& weights, SomeWords& read) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    const auto is_of = [&](const Stamp& stamp, const at::Tensor* weight) { return stamp.is_of(*weight, read); };
    const bool same = found != entries_.end() && std::equal(found->second.made_of.begin(), found->second.made_of.end(),
                                                            weights.begin(), weights.end(), is_of);
    return same ? found->second.panels : nullptr;
  }

  void keep(const PanelKey& key, const Weights& weights, Panels panels) {
    Entry entry{{}, std::move(panels)};
    for (const at::Tensor* weight : weights) entry.made_of.emplace_back(*weight);
    const std::lock_guard lock(mutex_);
    entries_.insert_or_assign(key, std::move(entry));
  }

  // lets go of what belongs to memory that is there no more
  void sweep() {
    const std::lock_guard lock(mutex_);
    const auto is_gone = [](const Stamp& stamp) { return stamp.is_gone(); };
    std::erase_if(entries_, [&](const auto& entry) { return std::ranges::any_of(entry.second.made_of, is_gone); });
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
  }

  // how many there are of memory that is still there, for tests
  int64_t count() {
    sweep();
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  struct Entry {
    std::vector<Stamp> made_of;
    Panels panels;
  };

  std::mutex mutex_;
  std::map<PanelKey, Entry> entries_;
};

// A matrix of a call, the weight that it is part of, another tensor that its panels are made of, or null, and its
// panels, whoever else lets go of them. M says how they are packed: key(), packed_words(), strips(), pack(strip) after
// lay(where).
template <typename M, typename T>
struct Part : M {
  Weight<T> weight;
  const at::Tensor* beside = nullptr;
  Panels held;

  std::array<const at::Tensor*, 2> tensors() const { return {weight.tensor, beside ? beside : weight.tensor}; }
  bool may_be_kept() const { return ::may_be_kept(*weight.tensor) && (!beside || ::may_be_kept(*beside)); }
};

// Finds kept panels, and makes those that are missing: to be kept, or else, if `whole`, in `memory` for this call.
template <typename M, typename T>
void pack_parts(std::vector<Part<M, T>*> parts, bool make_kept, bool whole, Memory& memory) {
  KeptPanels& kept = KeptPanels::all();
  SomeWords read;
  const auto keeps = [&](const Part<M, T>& p) { return make_kept && p.may_be_kept(); };
  std::erase_if(parts, [&](Part<M, T>* p) {
    if (p->may_be_kept()) p->held = kept.find(p->key(), p->tensors(), read);
    if (p->held) p->lay(p->held.get());
    return p->held || !(keeps(*p) || whole);
  });
  if (parts.empty()) return;
  struct Strip { const M* matrix; int64_t number; };
  std::vector<Strip> strips;
  int64_t words = 0;
  for (const auto* p : parts) words += keeps(*p) ? 0 : p->packed_words();
  float* to = memory.grown<float>(words);
  for (auto* p : parts) {
    if (keeps(*p)) p->lay((p->held = new_panels(p->packed_words())).get());
    else p->lay(to), to += p->packed_words();
    for (int64_t s = 0; s < p->strips(); s++) strips.push_back({p, s});
  }
  share_out(strips.size(), [&](int64_t i) { strips[i].matrix->pack(strips[i].number); });
  kept.sweep();
  for (const auto* p : parts)
    if (p->held) kept.keep(p->key(), p->tensors(), p->held);
}

}  // namespace
