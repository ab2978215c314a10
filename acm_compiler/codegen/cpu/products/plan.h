// How products that do not wait for each other are cut into items of about equal size, which threads take in turns.
//
// A piece is some columns of one product (a strip) times some of its rows; an item is a piece, or several small ones
// together. Sizes are counted in multiply-adds. How work is cut has no part in a token's sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kTileRows = 6;
constexpr int64_t kLeastWork = 1 << 15;   // less is not worth another thread
constexpr int64_t kItemsPerThread = 4;    // so many at most: one slow core then holds the others for little
constexpr int64_t kPieceRows = 12;        // so many rows at least share what is read of a strip,
constexpr int64_t kStripRows = 4;         // which takes about as long as so many rows of it,
constexpr int64_t kStripCols = 4;         // and each strip as long as so many more columns
constexpr int64_t kChunkRows = 1024;      // tokens whose hidden values are kept at a time, for each thread,
constexpr int64_t kMostChunkThreads = 4;  // but for no more threads than these

inline int64_t divide_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }
inline int64_t round_up(int64_t count, int64_t unit) { return divide_up(count, unit) * unit; }

// rows [from, to), of which the first `depth` words take part
struct Span { int64_t from, to, depth; };

inline int64_t height_of(const std::vector<Span>& spans) { return spans.back().to - spans.front().from; }

// words that a column of these rows multiplies
inline int64_t words_of(const std::vector<Span>& spans) {
  int64_t sum = 0;
  for (const Span& span : spans) sum += (span.to - span.from) * span.depth;
  return sum;
}

// what the plan knows of a product: its rows, the deepest first; its columns; how many of them a strip may have, and of
// what number that is a multiple; how many multiply-adds a word is; of what number the rows of a piece are best a multiple
struct Job {
  std::vector<Span> spans;
  int64_t cols, widest, unit, per_word, tall = kTileRows;
  int64_t height = height_of(spans), column = words_of(spans) * per_word;  // column: multiply-adds of one

  // of strips of equal width, as wide as they may be
  int64_t width(int64_t most) const { return std::min(most, round_up(divide_up(cols, divide_up(cols, most)), unit)); }
  int64_t work() const { return cols * column; }
};

struct Piece {
  int64_t job, col, count;  // columns [col, col + count) of the product
  std::vector<Span> spans;
};

struct Plan {
  std::vector<Piece> pieces;
  std::vector<int64_t> stops, work;  // of each item: where its pieces end, its multiply-adds

  int64_t items() const { return work.size(); }
};

// the spans in so many parts of equal work
inline std::vector<std::vector<Span>> cut_rows(const std::vector<Span>& spans, int64_t count, int64_t tall) {
  if (count == 1) return {spans};
  std::vector<std::vector<Span>> parts(1);
  const int64_t work = words_of(spans);
  int64_t done = 0;
  for (Span rest : spans)
    while (rest.from < rest.to) {
      const int64_t number = parts.size(), left = std::max<int64_t>(1, work * number / count - done);
      const int64_t to = std::min(rest.to, rest.from + round_up(divide_up(left, rest.depth), tall));
      if (done * count >= work * number && number < count) parts.emplace_back();
      parts.back().push_back({rest.from, to, rest.depth});
      done += (to - rest.from) * rest.depth, rest.from = to;
    }
  return parts;
}

// How a job is cut: strips of so many columns, so many parts of its rows.
struct Cut {
  int64_t width, strips, parts, work, cost;  // of the largest piece: multiply-adds, and time in the same unit

  // pieces of about `target`, in strips of so many sixteenths of the widest
  Cut(const Job& job, int64_t target, int64_t share) {
    const int64_t height = job.height;
    width = job.width(std::max(job.unit, round_up(job.widest * share / 16, job.unit)));
    strips = divide_up(job.cols, width);
    const int64_t cols = std::min(width, job.cols), strip = cols * job.column;
    parts = std::clamp<int64_t>(strip / target, 1, std::max<int64_t>(1, height / kPieceRows));
    const int64_t rows = std::min(height, round_up(divide_up(height, parts), job.tall));
    work = strip / height * rows;
    cost = (cols + kStripCols) * (job.column / height) * (rows + kStripRows);
  }
};

// how all jobs are cut so that the last of so many threads is done soonest
inline std::vector<Cut> best_cuts(const std::vector<Job>& jobs, int64_t threads) {
  std::vector<Cut> best, some;
  int64_t all = 0, tallest = 0, least = std::numeric_limits<int64_t>::max();
  for (const Job& job : jobs) all += job.work(), tallest = std::max(tallest, job.height);
  const int64_t most = tallest < 2 * kPieceRows ? 1 : kItemsPerThread;  // rows that cannot be cut have one way
  for (int64_t share = 16; share >= 1; share--) {
    for (int64_t each = most; each >= 1; each--) {
      const int64_t target = std::max(kLeastWork, all / (threads * each));
      int64_t largest = kLeastWork, longest = 0, items = 0;  // items: times the largest, as small pieces go together
      some.clear();
      for (const Job& job : jobs) largest = std::max(largest, some.emplace_back(job, target, share).work);
      for (const Cut& cut : some) {
        const int64_t together = std::max<int64_t>(1, largest / cut.work);
        items += cut.strips * cut.parts * largest / together;
        longest = std::max(longest, together * cut.cost);
      }
      const int64_t time = divide_up(divide_up(items, largest), threads) * longest;
      if (time < least) least = time, best = some;
    }
  }
  return best;
}

// The items of these jobs: small pieces go together, as long as they are no more than the largest piece or what is
// worth a thread.
inline Plan plan(const std::vector<Job>& jobs, int64_t threads) {
  Plan made;
  std::vector<int64_t> work;
  const auto cuts = best_cuts(jobs, threads);
  for (size_t j = 0; j < jobs.size(); j++) {
    const auto parts = cut_rows(jobs[j].spans, cuts[j].parts, jobs[j].tall);
    for (int64_t col = 0; col < jobs[j].cols; col += cuts[j].width)
      for (const auto& spans : parts) {
        const int64_t count = std::min(cuts[j].width, jobs[j].cols - col);
        made.pieces.push_back({static_cast<int64_t>(j), col, count, spans});
        work.push_back(count * words_of(spans) * jobs[j].per_word);
      }
  }
  const int64_t limit = std::max(kLeastWork, *std::max_element(work.begin(), work.end()));
  for (size_t i = 0; i < work.size(); i++) {
    if (i == 0 || made.work.back() + work[i] > limit) made.stops.push_back(i), made.work.push_back(0);
    made.stops.back() = i + 1, made.work.back() += work[i];
  }
  return made;
}

// borders of the chunks of so many sorted tokens: equal ones, each of which all threads share
inline std::vector<int64_t> cut_chunks(int64_t tokens, int64_t threads) {
  const int64_t count = divide_up(tokens, kChunkRows * std::min(threads, kMostChunkThreads));
  std::vector<int64_t> borders(1, 0);
  for (int64_t c = 1; c <= count; c++) borders.push_back(tokens * c / count);
  return borders;
}

}  // namespace
