// Panels of int8 weights, kept from call to call for as long as a weight's memory lives and nothing writes to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <tuple>

#include "int8_matrix.h"

namespace {

using Panels = std::shared_ptr<int32_t>;

inline Panels new_panels(int64_t words) {
  constexpr std::align_val_t kLine{64};
  return {static_cast<int32_t*>(::operator new(words * sizeof(int32_t), kLine)),
          [](int32_t* p) { ::operator delete(p, kLine); }};
}

// A weight of a call. What is not counted when it is written (torch's inference tensors) can have no panels kept.
struct ByteWeight {
  const at::Tensor* tensor = nullptr;
  const int8_t* data = nullptr;

  ByteWeight() = default;
  explicit ByteWeight(const at::Tensor& weight) : tensor(&weight), data(weight.const_data_ptr<int8_t>()) {}
  explicit ByteWeight(const std::optional<at::Tensor>& weight) {
    if (weight) *this = ByteWeight(*weight);
  }
  explicit operator bool() const { return data; }
  bool is_counted() const { return !tensor->is_inference(); }
};

class KeptPanels {
 public:
  static KeptPanels& all() {
    static KeptPanels* kept = new KeptPanels;  // never destroyed: threads may outlive static objects
    return *kept;
  }

  // the panels of a matrix that is part of that weight; null where there are none, or the weight was written since
  Panels find(const ByteMatrix& m, const ByteWeight& weight) {
    if (!weight.is_counted()) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key(m));
    const bool same = found != entries_.end() && found->second.storage._unsafe_get_target() == storage(weight) &&
                      !found->second.storage.expired() && found->second.version == weight.tensor->_version();
    return same ? found->second.panels : nullptr;
  }

  void keep(const ByteMatrix& m, const ByteWeight& weight, Panels panels) {
    const std::lock_guard lock(mutex_);
    entries_.insert_or_assign(
        key(m), Entry{weight.tensor->storage().getWeakStorageImpl(), weight.tensor->_version(), std::move(panels)});
  }

  // lets go of what belongs to memory that is there no more
  void sweep() {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.storage.expired(); });
  }

  // how many there are of memory that is still there, for tests
  int64_t count() {
    sweep();
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  using Key = std::tuple<const int8_t*, int64_t, int64_t, int64_t>;
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t version;
    Panels panels;
  };

  static Key key(const ByteMatrix& m) { return {m.data, m.cols, m.depth, m.stride}; }
  static const c10::StorageImpl* storage(const ByteWeight& weight) {
    return weight.tensor->storage().unsafeGetStorageImpl();
  }

  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

}  // namespace
