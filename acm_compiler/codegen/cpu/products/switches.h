// Switches of the kernel, and counters that tests read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "kept.h"
#include "plan.h"
#include "share.h"
#include "tiles.h"

// how many threads had a part in calls since it was asked last; for tests
extern "C" __attribute__((visibility("default"))) int64_t acm_threads_that_worked() {
  return std::count_if(std::begin(worked), std::end(worked), [](auto& one) { return one.exchange(false); });
}

// for tests: whether int8 products may use the processor's tiles; whether it has any
extern "C" __attribute__((visibility("default"))) bool acm_want_tiles(bool wanted) {
  tiles_wanted = true;
  const bool any = has_tiles();
  tiles_wanted = wanted;
  return any;
}

// whether calls keep panels of weights; those that are kept are let go of where they do not
extern "C" __attribute__((visibility("default"))) void acm_keep_panels(bool wanted) {
  panels_kept = wanted;
  if (!wanted) KeptPanels::all().clear();
}

// for tests: of how many matrices panels are kept
extern "C" __attribute__((visibility("default"))) int64_t acm_kept_panels() { return KeptPanels::all().count(); }

// for tests: how many columns were packed since it was asked last, in parts where a panel does not take all of one
extern "C" __attribute__((visibility("default"))) int64_t acm_columns_packed() { return columns_packed.exchange(0); }

// for tests: calls of this thread plan and do not compute, until their items' sizes are asked for: in multiply-adds, a 0
// after those of each plan; `to` has room for so many, and is given how many there are
extern "C" __attribute__((visibility("default"))) void acm_watch_plans() { watched.reset(new std::vector<int64_t>); }
extern "C" __attribute__((visibility("default"))) int64_t acm_watched_plans(int64_t* to, int64_t room) {
  const auto sizes = std::move(watched);
  std::copy_n(sizes->begin(), std::min<int64_t>(room, sizes->size()), to);
  return sizes->size();
}
